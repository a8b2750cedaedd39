// Products of a few rows with a weight in oneDNN's layout: panels of some columns (rows of the weight
// in the checkpoint), in which the pairs of one k and the next are contiguous. The weight is read from
// memory once for all rows. A result does not depend on the other rows. If the compiler may use AMX,
// amx.h has the products of panels; without AMX, panels have 64 columns.
#pragma once

#include <type_traits>

#include "block_tile.h"
#include "rows.h"
#include "vectors.h"

namespace disagg {

constexpr int MOST_ROWS = 6;      // of a tile: 24 of 32 registers hold its sums, or 12 of 16
constexpr int PREFETCHED = 4096;  // bytes ahead; the CPU's prefetcher stops at the end of a page

struct Matrix {
  const uint32_t* panels;  // null: the weight has 8 or 4 bits
  const bf16* bias;        // null: none
  const int8_t* numbers;   // of 8 bits, as int8.h has them: [num_panels, num_in, PANEL], or null
  const uint8_t* nibbles;  // of 4 bits, as int4.h has them, or null
  // With 8 bits [num_out], or with groups [num_panels, num_groups, PANEL]; with 4 bits [num_panels,
  // num_groups, 2, PANEL].
  const bf16* scales;
  int32_t num_out;
  int32_t num_in;      // even for a weight in panels, a multiple of 8 for a 4-bit weight
  int32_t group_size;  // numbers that share a scale: 4 bits: a multiple of 8; 8 bits: 0 means all
  int32_t panel_width;  // of `panels`: columns, a multiple of 16

  int num_panels() const { return (num_out + PANEL - 1) / PANEL; }
  int num_pairs() const { return num_in / 2; }
  int num_groups() const { return (num_in + group_size - 1) / group_size; }
  // oneDNN pads to a multiple of TILE_DEPTH numbers.
  int num_filled_pairs() const { return filled(num_in, TILE_DEPTH) / 2; }
  const uint32_t* panel(int index) const {
    return panels == nullptr ? nullptr : panels + int64_t(index) * num_filled_pairs() * PANEL;
  }
  // The address of a column; for one beyond the last panel, that of any existing column.
  const uint32_t* column(int index) const {
    const int panel = index < num_out ? index / panel_width : 0;
    const int64_t panel_size = int64_t(num_filled_pairs()) * panel_width;
    return panels + panel * panel_size + index % panel_width;
  }
};

constexpr int tiles_of(int num_rows) { return (num_rows + MOST_ROWS - 1) / MOST_ROWS; }

// Where all columns are multiplied at once, the sums stay in registers.
template <int num_rows, int num_vectors, class Fetch, class Take>
inline void whole_tile(const uint32_t* weight, const Number* x, int64_t stride, int num_pairs,
                       Fetch&& fetch, Take&& take) {
  Floats sums[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) sums[r][v] = zeros();
  auto fetch_all = [&](int k, const uint32_t* columns) __attribute__((always_inline)) {
    fetch(k, columns, 0, std::integral_constant<int, num_vectors>());
  };
  add_panel(weight, x, stride, num_pairs, sums, fetch_all);
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) take(r, v, sums[r][v]);
}

// Else the columns are multiplied some at a time, over so many numbers of them that they stay in the
// L1 cache. Not inlined, so that it can use all registers.
template <int num_rows, int num_vectors, class Fetch, class Take>
[[gnu::noinline]] void tile_in_parts(const uint32_t* weight, const Number* x, int64_t stride,
                                     int num_pairs, Fetch&& fetch, Take&& take) {
  constexpr int DEPTH = BLOCK_DEPTH / 2;
  constexpr int AT_ONCE = vectors_at_once(num_rows, num_vectors);
  alignas(64) float sums[num_rows * PANEL] = {};
  for (int k = 0; k < num_pairs; k += DEPTH) {
    const int count = num_pairs - k < DEPTH ? num_pairs - k : DEPTH;
    for (int v = 0; v < num_vectors; v += AT_ONCE) {
      auto fetch_more = [&](int i, const uint32_t* columns) __attribute__((always_inline)) {
        fetch(k + i, columns, v, std::integral_constant<int, AT_ONCE>());
      };
      block_tile<num_rows, AT_ONCE>(weight + int64_t(k) * PANEL + v * LANES,
                                    x + int64_t(k) * NUMBERS_OF_PAIR, stride, count,
                                    sums + v * LANES, fetch_more);
    }
  }
  for (int r = 0; r < num_rows; ++r)
    for (int v = 0; v < num_vectors; ++v) take(r, v, load(sums + r * PANEL + v * LANES));
}

// Sums of `num_rows` rows and `num_vectors` * 16 columns, which are passed to
// `take(row, vector, sums)`. Rows are `stride` numbers apart. `fetch(k, columns, vector, count)` may
// prefetch what is read after the `k`th pair of `count` vectors from `vector` on.
template <int num_rows, int num_vectors, class Fetch, class Take>
inline void tile(const uint32_t* weight, const Number* x, int64_t stride, int num_pairs,
                 Fetch&& fetch, Take&& take) {
  if constexpr (vectors_at_once(num_rows, num_vectors) == num_vectors)
    whole_tile<num_rows, num_vectors>(weight, x, stride, num_pairs, fetch, take);
  else
    tile_in_parts<num_rows, num_vectors>(weight, x, stride, num_pairs, fetch, take);
}

// Cuts rows into as few tiles as possible, of sizes that differ by one at most, and calls
// `run(tile, first row, number of rows)` for each. The number is a type, so that the compiler makes
// code for each number.
template <class Run>
inline void in_tiles(int num_rows, Run&& run) {
  const int num_tiles = tiles_of(num_rows);
  for (int i = 0; i < num_tiles; ++i) {
    const int begin = int64_t(i) * num_rows / num_tiles, end = int64_t(i + 1) * num_rows / num_tiles;
    switch (end - begin) {
      case 1: run(i, begin, std::integral_constant<int, 1>()); break;
      case 2: run(i, begin, std::integral_constant<int, 2>()); break;
      case 3: run(i, begin, std::integral_constant<int, 3>()); break;
      case 4: run(i, begin, std::integral_constant<int, 4>()); break;
      case 5: run(i, begin, std::integral_constant<int, 5>()); break;
      case 6: run(i, begin, std::integral_constant<int, 6>()); break;
    }
  }
}

// A part of a panel (its `part`th `num_vectors` * 16 columns) for all rows; `take(row, column,
// sums)` gets rows and columns of the whole product. `next` is the memory that this thread will
// probably read afterwards. Later tiles find this panel in the cache and have time to prefetch `next`.
template <int num_vectors, class Take>
inline void product(const Matrix& matrix, int panel, int part, const Activation* x, int num_rows,
                    const uint32_t* next, Take&& take) {
  const int num_pairs = matrix.num_pairs(), num_tiles = tiles_of(num_rows);
  const uint32_t* weight = matrix.panel(panel) + part * num_vectors * LANES;
  const int first_column = panel * PANEL + part * num_vectors * LANES;
  const Number* numbers = numbers_of(x);
  const int64_t stride = int64_t(num_pairs) * NUMBERS_OF_PAIR;
  const int step = num_tiles < 4 ? 2 : 1;  // of the 4 lines that a pair has in a panel
  in_tiles(num_rows, [&](int i, int begin, auto size) {
    const bool has_time = num_vectors == 4 && num_tiles > 1 && i * step < 4;
    const uint32_t* ahead = has_time ? next + int64_t(i) * step * num_pairs * LANES : weight;
    // Two lines of `ahead` for each pair, `step` lines further each time. Always inlined, because gcc
    // omits calls of functions that only prefetch.
    auto fetch = [&](int k, const uint32_t* columns, int vector,
                     auto count) __attribute__((always_inline)) {
      for (int v = 0; v < count(); ++v)
        _mm_prefetch(reinterpret_cast<const char*>(columns + v * LANES) + PREFETCHED, _MM_HINT_T0);
      const uint32_t* lines = ahead + (int64_t(k) * step + vector / 2) * LANES;
      _mm_prefetch(reinterpret_cast<const char*>(lines), _MM_HINT_T1);
      if (count() == 4) _mm_prefetch(reinterpret_cast<const char*>(lines + LANES), _MM_HINT_T1);
    };
    tile<size(), num_vectors>(weight, numbers + begin * stride, stride, num_pairs, fetch,
                              [&](int r, int v, Floats sums) {
                                take(begin + r, first_column + v * LANES, sums);
                              });
  });
}

// Multiplies the columns that exist by their scales, and adds the bias.
inline Floats finished(const Matrix& matrix, int column, Floats sums) {
  const Mask mask = first_lanes(matrix.num_out - column);
  if (matrix.numbers != nullptr && matrix.group_size == 0)
    sums = sums * load(matrix.scales + column, mask);
  if (matrix.bias != nullptr) sums = sums + load(matrix.bias + column, mask);
  return sums;
}

// out: [rows, num_out].
inline void store_finished(const Matrix& matrix, int row, int column, Floats sums, bf16* out) {
  store(out + int64_t(row) * matrix.num_out + column, finished(matrix, column, sums),
        first_lanes(matrix.num_out - column));
}

}  // namespace disagg
