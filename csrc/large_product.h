// Products of many rows with a weight in panels. A result is bit-identical to that of a product of a
// few rows (`tiles_product` with AMX, else `product`), and does not depend on the other rows.
#pragma once

#include "amx.h"
#include "product.h"
#include "rows.h"

namespace disagg {

constexpr int MOST_COLUMNS = 128;  // of an item, so that their part of a weight stays in the L2 cache

// The columns `first` to `end` of a weight, at most MOST_COLUMNS. `first` begins a panel.
struct SomeColumns {
  const Matrix& matrix;
  int32_t first, end;
  const uint32_t* widened;  // panels of a weight of fewer bits, made by widen_panels

  // Of a weight of fewer bits.
  const uint32_t* widened_panel(int column) const {
    return widened + int64_t((column - first) / PANEL) * matrix.num_filled_pairs() * PANEL;
  }
};

#ifdef __AMX_BF16__

constexpr int BLOCK = 2 * TILE_ROWS;   // rows and columns that are multiplied with four tiles of sums
constexpr int BLOCK_SIZE = BLOCK * BLOCK;
constexpr int BLOCK_ROWS = BLOCK;
constexpr int ROWS_OF_PRODUCT = 4 * BLOCK_ROWS;

inline TileColumns<2> block_of(const SomeColumns& columns, int column) {
  if (columns.widened == nullptr) return columns_of<2>(columns.matrix, column);
  const uint32_t* at = columns.widened_panel(column) + (column - columns.first) % PANEL;
  return {{at, at + LANES}, PANEL * sizeof(uint32_t), false};
}

// The products of 32 rows from `row` on with some columns: `take(row of 32, column, sums)` gets 16
// columns at a time. sums: [MOST_COLUMNS / BLOCK, BLOCK, BLOCK].
template <class Take>
inline void multiply_rows(const SomeColumns& columns, const Rows& x, int64_t row, int num_rows,
                          float* sums, Take&& take) {
  const int depth = 2 * columns.matrix.num_filled_pairs(), end = columns.end;
  for (int k = 0; k < depth; k += BLOCK_DEPTH) {
    const int next = k + BLOCK_DEPTH < depth ? k + BLOCK_DEPTH : depth;
    float* block = sums;
    for (int column = columns.first; column < end; column += BLOCK, block += BLOCK_SIZE) {
      tile_product_32(x, row, block_of(columns, column), k, next, block, BLOCK * sizeof(float));
      if (next < depth) continue;
      for (int r = 0; r < num_rows; ++r)
        for (int v = 0; v < BLOCK && column + v < end; v += LANES)
          take(r, column + v, load(block + r * BLOCK + v));
    }
  }
}

#else

constexpr int BLOCK_ROWS = 8 * MOST_ROWS;
constexpr int BLOCK_SIZE = BLOCK_ROWS * PANEL;
constexpr int ROWS_OF_PRODUCT = 3 * BLOCK_ROWS;

// The data that products of a block of rows read.
#ifdef __AVX512BF16__

struct BlockRows {
  const Number* numbers;
  int64_t stride;

  BlockRows(const Rows& x, int64_t row, int, int first_pair, int)
      : numbers(numbers_of(x.at(row, 2 * first_pair))), stride(x.num_filled_columns() / 2) {}
};

#else

struct BlockRows {
  alignas(64) Number numbers[BLOCK_ROWS * BLOCK_DEPTH];
  static constexpr int64_t stride = BLOCK_DEPTH;

  BlockRows(const Rows& x, int64_t row, int num_rows, int first_pair, int num_pairs) {
    const bf16* from = x.at(row, 2 * first_pair);
    for (int r = 0; r < num_rows; ++r)
      copy_row(from + r * x.num_filled_columns(), 2 * num_pairs, numbers + r * BLOCK_DEPTH);
  }
};

#endif

// One copy of the code, for all products.
[[gnu::noinline]] inline void multiply_block(const uint32_t* weight, const Number* x, int64_t stride,
                                             int num_rows, int num_pairs, float* sums) {
  constexpr int AT_ONCE = vectors_at_once(MOST_ROWS, PANEL / LANES);
  for (int column = 0; column < PANEL; column += AT_ONCE * LANES)
    in_tiles(num_rows, [&](int, int begin, auto size) {
      block_tile<size(), AT_ONCE>(weight + column, x + begin * stride, stride, num_pairs,
                                  sums + begin * PANEL + column, no_fetch);
    });
}

// The products of up to BLOCK_ROWS rows from `row` on with some columns: `take(row of these, column,
// sums)` gets 16 columns at a time. sums: [MOST_COLUMNS / PANEL, BLOCK_ROWS, PANEL].
template <class Take>
inline void multiply_rows(const SomeColumns& columns, const Rows& x, int64_t row, int num_rows,
                          float* sums, Take&& take) {
  constexpr int STEP = BLOCK_DEPTH / 2;
  const int num_pairs = (columns.matrix.num_in + 1) / 2, end = columns.end;
  for (int k = 0; k < num_pairs; k += STEP) {
    const int count = num_pairs - k < STEP ? num_pairs - k : STEP;
    const BlockRows rows(x, row, num_rows, k, count);
    float* block = sums;
    for (int column = columns.first; column < end; column += PANEL, block += BLOCK_SIZE) {
      const uint32_t* panel = columns.widened == nullptr ? columns.matrix.panel(column / PANEL)
                                                         : columns.widened_panel(column);
      if (k == 0) memset(block, 0, sizeof(float) * num_rows * PANEL);
      multiply_block(panel + int64_t(k) * PANEL, rows.numbers, rows.stride, num_rows, count, block);
      if (k + count < num_pairs) continue;
      for (int r = 0; r < num_rows; ++r)
        for (int v = 0; v < PANEL && column + v < end; v += LANES)
          take(r, column + v, load(block + r * PANEL + v));
    }
  }
}

#endif

}  // namespace disagg
