// Keys and values of a tile of positions, packed as products read a weight, and scores with them.
#pragma once

#include "product.h"
#include "vectors.h"

namespace disagg {

constexpr int KEY_TILE = PANEL;  // positions
constexpr int KEY_PAIRS = KEY_TILE / 2;

// 16 rows of 16 words become their columns.
inline void turn(__m512i (&rows)[LANES]) {
  __m512i other[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
  }
  // Now a quarter of rows[4 i + j] has word 4 q + j of rows 4 i to 4 i + 3, in quarter q.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xDD);
    const __m512i later_low = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
    const __m512i later_high = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xDD);
    other[j] = _mm512_shuffle_i32x4(low, later_low, 0x88);
    other[8 + j] = _mm512_shuffle_i32x4(low, later_low, 0xDD);
    other[4 + j] = _mm512_shuffle_i32x4(high, later_high, 0x88);
    other[12 + j] = _mm512_shuffle_i32x4(high, later_high, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) rows[i] = other[i];
}

// The largest number of each of 16 rows.
inline __m512 row_maxima(const float (*rows)[KEY_TILE]) {
  __m512 some[LANES];
#pragma GCC unroll 16
  for (int r = 0; r < LANES; ++r) {
    auto part = [&](int v) { return _mm512_load_ps(rows[r] + v * LANES); };
    some[r] = _mm512_max_ps(_mm512_max_ps(part(0), part(1)), _mm512_max_ps(part(2), part(3)));
  }
  // Quarter q of some[4 i] has, of rows 4 i to 4 i + 3, the largest number of quarter q.
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    auto pair = [&](int r) {
      return _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(some[r], some[r + 1]),
                                            _mm512_unpackhi_ps(some[r], some[r + 1])));
    };
    const __m512d upper = pair(i), lower = pair(i + 2);
    some[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(upper, lower)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(upper, lower)));
  }
  auto quarters = [](__m512 left, __m512 right) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(left, right, 0x88),
                         _mm512_shuffle_f32x4(left, right, 0xDD));
  };
  return quarters(quarters(some[0], some[4]), quarters(some[8], some[12]));
}

// Keys, or zeros where `keys[i]` is null, as `tile` reads a panel of a weight.
inline void pack_keys(const bf16* const* keys, int head_dim, uint32_t* out) {
  const int num_pairs = head_dim / 2;
  for (int first = 0; first < KEY_TILE; first += LANES) {
    for (int pair = 0; pair < num_pairs; pair += LANES) {
      const __mmask16 mask = first_lanes(num_pairs - pair);
      __m512i rows[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        const bf16* key = keys[first + i];
        rows[i] = _mm512_maskz_loadu_epi32(key == nullptr ? 0 : mask, key + 2 * pair);
      }
      turn(rows);
      const int count = num_pairs - pair < LANES ? num_pairs - pair : LANES;
      for (int i = 0; i < count; ++i)
        _mm512_storeu_si512(out + int64_t(pair + i) * KEY_TILE + first, rows[i]);
    }
  }
}

inline void pack_values(const bf16* const* values, int head_dim, uint32_t* out) {
  auto words = [](const bf16* value, int d) {
    if (value == nullptr) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + d)));
  };
  for (int pair = 0; pair < KEY_PAIRS; ++pair)
    for (int d = 0; d < head_dim; d += LANES) {
      const __m512i first = words(values[2 * pair], d), second = words(values[2 * pair + 1], d);
      const int64_t row = int64_t(d / PANEL) * KEY_PAIRS + pair;
      _mm512_storeu_si512(out + row * PANEL + d % PANEL,
                          _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    }
}

}  // namespace disagg
