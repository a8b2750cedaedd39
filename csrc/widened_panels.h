// Weights of 8 and 4 bits as panels of bfloat16, for products by AMX.
#pragma once

#include "int4.h"
#include "int8.h"
#include "product.h"

namespace disagg {

inline __m512i pairs_of(__m512 even, __m512 odd) {
  const __m512i low = _mm512_cvtepu16_epi32(narrowed(even));
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(odd)), 16));
}

// A panel of 64 columns: out has PANEL pairs for each two numbers. Where `finished` multiplies by the
// scale, the numbers stay as they are, which bfloat16 has exactly; else products are rounded.
inline void widen_int8(const Matrix& matrix, int panel, uint32_t* out) {
  const int8_t* columns = matrix.numbers + int64_t(panel) * matrix.num_in * PANEL;
  auto values = [&](int k, int v) {
    if (k >= matrix.num_in) return _mm512_setzero_ps();
    const __m512 numbers = widened(columns + int64_t(k) * PANEL + v * LANES);
    if (matrix.group_size == 0) return numbers;
    const bf16* scales = group_scales(matrix, panel, k / matrix.group_size);
    return _mm512_mul_ps(numbers, load(scales + v * LANES));
  };
  for (int pair = 0; pair < matrix.num_filled_pairs(); ++pair)
    for (int v = 0; v < PANEL / LANES; ++v)
      _mm512_storeu_si512(out + int64_t(pair) * PANEL + v * LANES,
                          pairs_of(values(2 * pair, v), values(2 * pair + 1, v)));
}

inline void widen_int4(const Matrix& matrix, int panel, uint32_t* out) {
  const int num_pairs = matrix.num_pairs();
  const uint8_t* units = matrix.nibbles + int64_t(panel) * (num_pairs / UNIT_PAIRS) * UNIT_BYTES;
  const __m512i table = table_of_numbers(), upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int pair = 0; pair < num_pairs; ++pair) {
    const uint8_t* unit = units + int64_t(pair / UNIT_PAIRS) * UNIT_BYTES;
    const bf16* scales = group_of_panel(matrix, panel, 2 * pair / matrix.group_size);
    for (int v = 0; v < PANEL / LANES; ++v) {
      const __m512i words = _mm512_loadu_si512(unit + v * VECTOR_BYTES);
      const __m512i shifted = _mm512_srl_epi16(words, _mm_cvtsi32_si128(4 * (pair % UNIT_PAIRS)));
      const __m512i numbers = _mm512_permutexvar_epi16(shifted, table);
      const __m512 scale = load(scales + v * LANES), least = load(scales + PANEL + v * LANES);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(numbers, upper));
      _mm512_storeu_si512(
          out + int64_t(pair) * PANEL + v * LANES,
          pairs_of(_mm512_fmadd_ps(even, scale, least), _mm512_fmadd_ps(odd, scale, least)));
    }
  }
  memset(out + int64_t(num_pairs) * PANEL, 0,
         sizeof(uint32_t) * PANEL * (matrix.num_filled_pairs() - num_pairs));
}

// The panels that have the columns `first` to `end`, one behind the other; `first` is the first of one.
inline void widen_panels(const Matrix& matrix, int first, int end, uint32_t* out) {
  for (int panel = first / PANEL; panel * PANEL < end; ++panel) {
    if (matrix.nibbles != nullptr)
      widen_int4(matrix, panel, out);
    else
      widen_int8(matrix, panel, out);
    out += int64_t(matrix.num_filled_pairs()) * PANEL;
  }
}

}  // namespace disagg
