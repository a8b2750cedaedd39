// Products of a few rows with a 4-bit weight: numbers from 0 to 15. Some neighbouring numbers in a row
// of the checkpoint (a group) share a scale and a least value. The twin is
// disagg/kernels/cpu/narrow_linear.py. A result does not depend on the other rows of `x`.
//
// Panels have 64 columns (rows of the checkpoint's weight). For each 8 numbers of these columns, a
// panel has 4 vectors of 16 columns, in which a column has two words of 16 bits: the first has the
// numbers 0, 2, 4 and 6 from its lowest bits on, and the second has 1, 3, 5 and 7. So a shift and a
// table of 16 numbers make the pairs that `add_pairs` needs.
#pragma once

#include "product.h"
#include "vectors.h"

namespace disagg {

constexpr int UNIT = 8;                  // contiguous numbers of a column
constexpr int UNIT_PAIRS = UNIT / 2;
constexpr int UNIT_BYTES = PANEL * UNIT / 2;
constexpr int VECTOR_BYTES = 64;

#ifdef __AVX512BF16__

inline float sum_of_pairs(const Number* x, int num_pairs) {
  const Words ones = broadcast_word(0x3F803F80);
  Floats sums = zeros();
  for (int k = 0; k < num_pairs; k += LANES)
    sums = dot_pairs(sums, load_words(x + k, first_lanes(num_pairs - k)), ones);
  return sum_of(sums);
}

#else

inline float sum_of_pairs(const Number* x, int num_pairs) {
  Floats sums = zeros();
  for (int k = 0; k < 2 * num_pairs; k += LANES)
    sums = sums + load(x + k, first_lanes(2 * num_pairs - k));
  return sum_of(sums);
}

#endif

// The scales of a group in a panel: PANEL scales, and then PANEL least values.
inline const bf16* group_of_panel(const Matrix& matrix, int64_t panel, int group) {
  return matrix.scales + (panel * matrix.num_groups() + group) * 2 * PANEL;
}

// Adds to `sums` the products of `num_pairs` pairs of each row and of `num_vectors` * 16 columns.
template <int num_rows, int num_vectors>
[[gnu::always_inline]] inline void add_units(const Nibbles& nibbles, const uint8_t* units,
                                             const Number* x, int64_t stride, int num_pairs,
                                             Floats (&sums)[num_rows][num_vectors]) {
  for (int k = 0; k < num_pairs; k += UNIT_PAIRS, units += UNIT_BYTES) {
    Words words[num_vectors];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) {
      words[v] = load_words(units + v * VECTOR_BYTES);
      _mm_prefetch(reinterpret_cast<const char*>(units + v * VECTOR_BYTES) + PREFETCHED, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_PAIRS; ++i) {
      NibblePairs columns[num_vectors];
#pragma GCC unroll 4
      for (int v = 0; v < num_vectors; ++v) columns[v] = nibbles.pairs(words[v], 4 * i);
      add_pairs(columns, x + int64_t(k + i) * NUMBERS_OF_PAIR, stride, sums);
    }
  }
}

// Sums of `num_rows` rows and `num_vectors` * 16 columns from column `offset` of a panel on, which are
// passed to `take(row, vector, sums)`. The columns of a group are multiplied some at a time, while the
// group is in the L1 cache.
template <int num_rows, int num_vectors, class Take>
inline void int4_tile(const Matrix& matrix, int panel, int offset, const Number* x, Take&& take) {
  constexpr int AT_ONCE = vectors_at_once(num_rows, num_vectors);
  const int num_pairs = matrix.num_pairs(), group_pairs = matrix.group_size / 2;
  const int64_t stride = int64_t(num_pairs) * NUMBERS_OF_PAIR;
  const uint8_t* units = matrix.nibbles + int64_t(panel) * (num_pairs / UNIT_PAIRS) * UNIT_BYTES +
                         offset / LANES * VECTOR_BYTES;
  const Nibbles nibbles;
  alignas(64) float totals[num_rows][num_vectors][LANES] = {};
  for (int begin = 0, group = 0; begin < num_pairs; begin += group_pairs, ++group) {
    const int left = num_pairs - begin, size = left < group_pairs ? left : group_pairs;
    const Number* numbers = x + int64_t(begin) * NUMBERS_OF_PAIR;
    float of_x[num_rows];
    for (int r = 0; r < num_rows; ++r) of_x[r] = sum_of_pairs(numbers + r * stride, size);
    const bf16* scales = group_of_panel(matrix, panel, group) + offset;
    for (int first = 0; first < num_vectors; first += AT_ONCE, scales += AT_ONCE * LANES) {
      Floats sums[num_rows][AT_ONCE];
#pragma GCC unroll 8
      for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < AT_ONCE; ++v) sums[r][v] = zeros();
      add_units(nibbles, units + first * VECTOR_BYTES, numbers, stride, size, sums);
#pragma GCC unroll 4
      for (int v = 0; v < AT_ONCE; ++v) {
        const Floats scale = load(scales + v * LANES), least = load(scales + PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r) {
          float* total = totals[r][first + v];
          const Floats scaled = fma(sums[r][v], scale, load(total));
          store(total, fma(broadcast(of_x[r]), least, scaled));
        }
      }
    }
    units += int64_t(size / UNIT_PAIRS) * UNIT_BYTES;
  }
  for (int r = 0; r < num_rows; ++r)
    for (int v = 0; v < num_vectors; ++v) take(r, v, load(totals[r][v]));
}

// As `product`, for a 4-bit weight.
template <int num_vectors, class Take>
inline void int4_product(const Matrix& matrix, int panel, int part, const Activation* x,
                         int num_rows, Take&& take) {
  const int offset = part * num_vectors * LANES;
  in_tiles(num_rows, [&](int, int begin, auto size) {
    const Number* rows = numbers_of(x + int64_t(begin) * matrix.num_in);
    int4_tile<size(), num_vectors>(matrix, panel, offset, rows, [&](int r, int v, Floats sums) {
      take(begin + r, panel * PANEL + offset + v * LANES, sums);
    });
  });
}

// One column of the weight, which is a row in the checkpoint: [num_in].
inline void int4_row(const Matrix& matrix, int64_t row, bf16* out) {
  const int64_t panel = row / PANEL;
  const int column = row % PANEL;
  const int num_units = matrix.num_in / UNIT;
  const uint8_t* words = matrix.nibbles + panel * num_units * UNIT_BYTES + column * sizeof(uint32_t);
  alignas(64) float values[LANES] = {};
  for (int unit = 0; unit < num_units; ++unit, words += UNIT_BYTES) {
    uint32_t both;  // the first word is the lower one
    memcpy(&both, words, sizeof both);
    const bf16* scales = group_of_panel(matrix, panel, unit * UNIT / matrix.group_size) + column;
    const float scale = wide_of(scales[0]), least = wide_of(scales[PANEL]);
    for (int k = 0; k < UNIT; ++k) {
      const uint32_t number = both >> (k % 2 * 16 + k / 2 * 4) & 15;
      values[k] = least + static_cast<float>(number) * scale;
    }
    store(out + unit * UNIT, load(values), first_lanes(UNIT));
  }
}

}  // namespace disagg
