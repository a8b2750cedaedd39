// Products of a few rows with a weight of 8 bits: int8 numbers in panels of 64 columns, in which
// the numbers of one k lie together, and a scale for each column. The twin is
// disagg/kernels/int8_linear.py. A result does not depend on the other rows of `x`.
#pragma once

#include "product.h"
#include "vectors.h"

namespace disagg {

constexpr int STRIP = 512;  // numbers of a row of `x` that are widened at a time

inline __m512 widened(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Sums of `num_rows` rows and `num_vectors` * 16 columns, handed to `take(row, vector, sums)`.
template <int num_rows, int num_vectors, class Take>
inline void int8_tile(const int8_t* weight, const bf16* x, int num_in, Take&& take) {
  __m512 sums[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) sums[r][v] = _mm512_setzero_ps();
  alignas(64) float wide[num_rows][STRIP];
  for (int begin = 0; begin < num_in; begin += STRIP) {
    const int left = num_in - begin, size = left < STRIP ? left : STRIP;
    for (int r = 0; r < num_rows; ++r)
      for (int k = 0; k < size; k += LANES)
        _mm512_store_ps(wide[r] + k, load(x + int64_t(r) * num_in + begin + k,
                                          first_lanes(size - k)));
    const int8_t* columns = weight + int64_t(begin) * PANEL;
    for (int k = 0; k < size; ++k, columns += PANEL) {
      _mm_prefetch(reinterpret_cast<const char*>(columns) + PREFETCHED, _MM_HINT_T0);
      __m512 numbers[num_vectors];
#pragma GCC unroll 4
      for (int v = 0; v < num_vectors; ++v) numbers[v] = widened(columns + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < num_rows; ++r) {
        const __m512 some = _mm512_set1_ps(wide[r][k]);
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; ++v)
          sums[r][v] = _mm512_fmadd_ps(numbers[v], some, sums[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) take(r, v, sums[r][v]);
}

// As `product`, of a weight of 8 bits.
template <int num_vectors, class Take>
inline void int8_product(const Matrix& matrix, int panel, int part, const bf16* x, int num_rows,
                         Take&& take) {
  const int num_in = matrix.num_in, offset = part * num_vectors * LANES;
  const int8_t* weight = matrix.numbers + int64_t(panel) * num_in * PANEL + offset;
  in_tiles(num_rows, [&](int, int begin, auto size) {
    int8_tile<size(), num_vectors>(weight, x + int64_t(begin) * num_in, num_in,
                                   [&](int r, int v, __m512 sums) {
                                     take(begin + r, panel * PANEL + offset + v * LANES, sums);
                                   });
  });
}

// One column of the weight, which is a row as a checkpoint has it: [num_in].
inline void int8_row(const Matrix& matrix, int64_t row, bf16* out) {
  const int8_t* from = matrix.numbers + row / PANEL * matrix.num_in * PANEL + row % PANEL;
  const __m512 scale = _mm512_set1_ps(wide_of(matrix.scales[row]));
  alignas(64) float numbers[LANES];
  for (int i = 0; i < matrix.num_in; i += LANES) {
    const int left = matrix.num_in - i, count = left < LANES ? left : LANES;
    for (int k = 0; k < count; ++k) numbers[k] = from[int64_t(i + k) * PANEL];
    store(out + i, _mm512_mul_ps(_mm512_load_ps(numbers), scale), first_lanes(count));
  }
}

}  // namespace disagg
