// Converts weights of 8 and 4 bits to panels of bfloat16, for products of many rows. Widening a number
// once for all rows takes less time than widening it in each product of a few rows.
#pragma once

#include "amx.h"
#include "int4.h"
#include "int8.h"

namespace disagg {

// Pairs of the numbers of one k and the next, for 16 columns, each rounded.
inline void store_pairs(uint32_t* to, Floats even, Floats odd) {
  store_words(to, narrowed_words(even) | as_words(rounded(odd)));
}

// out: [pairs of numbers, PANEL].
inline void widen_int4(const Matrix& matrix, int panel, uint32_t* out) {
  const Nibbles nibbles;
  const int num_units = matrix.num_in / UNIT;
  const uint8_t* units = matrix.nibbles + int64_t(panel) * num_units * UNIT_BYTES;
  for (int unit = 0; unit < num_units; ++unit, units += UNIT_BYTES) {
    const bf16* scales = group_of_panel(matrix, panel, unit * UNIT / matrix.group_size);
    for (int offset = 0; offset < PANEL; offset += LANES) {
      const Words words = load_words(units + offset / LANES * VECTOR_BYTES);
      const Floats scale = load(scales + offset), least = load(scales + PANEL + offset);
#pragma GCC unroll 4
      for (int i = 0; i < UNIT_PAIRS; ++i) {
        const NibblePairs pairs = nibbles.pairs(words, 4 * i);
        store_pairs(out + int64_t(unit * UNIT_PAIRS + i) * PANEL + offset,
                    fma(low_of(pairs), scale, least), fma(high_of(pairs), scale, least));
      }
    }
  }
}

// The same for 8 bits; `finished` multiplies by the scales of whole rows.
inline void widen_int8(const Matrix& matrix, int panel, uint32_t* out) {
  const int8_t* numbers = matrix.numbers + int64_t(panel) * matrix.num_in * PANEL;
  for (int k = 0; k < matrix.num_in; k += 2)
    for (int offset = 0; offset < PANEL; offset += LANES) {
      auto value = [&](int at) {
        if (at >= matrix.num_in) return zeros();
        const Floats wide = widened(numbers + int64_t(at) * PANEL + offset);
        if (matrix.group_size == 0) return wide;
        return wide * load(group_scales(matrix, panel, at / matrix.group_size) + offset);
      };
      store_pairs(out + int64_t(k / 2) * PANEL + offset, value(k), value(k + 1));
    }
}

// A panel, padded with zeros; out is [num_filled_pairs, PANEL].
inline void widen(const Matrix& matrix, int panel, uint32_t* out) {
  if (matrix.nibbles != nullptr)
    widen_int4(matrix, panel, out);
  else
    widen_int8(matrix, panel, out);
  const int num_pairs = (matrix.num_in + 1) / 2;
  memset(out + int64_t(num_pairs) * PANEL, 0,
         sizeof(uint32_t) * PANEL * (matrix.num_filled_pairs() - num_pairs));
}

// The panels with the columns `first` to `end`, one after the other; a panel begins at `first`.
inline void widen_panels(const Matrix& matrix, int first, int end, uint32_t* out) {
  for (int panel = first / PANEL; panel * PANEL < end; ++panel) {
    widen(matrix, panel, out);
    out += int64_t(matrix.num_filled_pairs()) * PANEL;
  }
}

#ifdef __AMX_BF16__

// As `int4_product` and `int8_product`, for a whole panel. It reads rows of `x` up to a multiple of
// TILE_ROWS. wide: [num_filled_pairs, PANEL].
template <class Take>
inline void widened_product(const Matrix& matrix, int panel, const bf16* x, int num_rows,
                            uint32_t* wide, Take&& take) {
  widen(matrix, panel, wide);
  Matrix own = {};
  own.panels = wide;
  own.num_out = own.panel_width = PANEL;
  own.num_in = matrix.num_in;
  tiles_product<4>(own, 0, 0, x, num_rows, [&](int row, int column, Floats sums) {
    take(row, panel * PANEL + column, sums);
  });
}

#endif

}  // namespace disagg
