// Products of many rows with a weight in panels, by AMX. A result is, to the bit, that of
// `tiles_product`, and does not depend on the other rows.
#pragma once

#include "amx.h"
#include "product.h"
#include "rows.h"

#ifdef __AMX_BF16__

namespace disagg {

constexpr int BLOCK = 2 * TILE_ROWS;   // rows and columns that are multiplied with four tiles of sums
constexpr int BLOCK_SIZE = BLOCK * BLOCK;
constexpr int BLOCK_DEPTH = 256;       // numbers of each row that stay in the L1 cache meanwhile
constexpr int MOST_COLUMNS = 128;      // of an item: their part of a weight stays in the L2 cache

// The columns `first` to `end` of a weight, of which there are at most MOST_COLUMNS.
struct SomeColumns {
  const Matrix& matrix;
  int32_t first, end;
  const uint32_t* widened;  // of a weight of fewer bits: its panels, as widen_panels makes them

  TileColumns<2> block(int column) const {
    if (widened == nullptr) return columns_of<2>(matrix, column);
    const int64_t panel = (column - first) / PANEL;
    const uint32_t* at =
        widened + panel * matrix.num_filled_pairs() * PANEL + (column - first) % PANEL;
    return {{at, at + LANES}, PANEL * sizeof(uint32_t), false};
  }
};

// The products of 32 rows from `row` on with some columns: `take(row of 32, column, sums)` gets 16
// columns at a time. sums: [MOST_COLUMNS / BLOCK, BLOCK, BLOCK].
template <class Take>
inline void multiply_rows(const SomeColumns& columns, const TiledRows& x, int64_t row, int num_rows,
                          float* sums, Take&& take) {
  const int depth = 2 * columns.matrix.num_filled_pairs(), end = columns.end;
  for (int k = 0; k < depth; k += BLOCK_DEPTH) {
    const int next = k + BLOCK_DEPTH < depth ? k + BLOCK_DEPTH : depth;
    float* block = sums;
    for (int column = columns.first; column < end; column += BLOCK, block += BLOCK_SIZE) {
      tile_product_32(x, row, columns.block(column), k, next, block, BLOCK * sizeof(float));
      if (next < depth) continue;
      for (int r = 0; r < num_rows; ++r)
        for (int v = 0; v < BLOCK && column + v < end; v += LANES)
          take(r, column + v, _mm512_load_ps(block + r * BLOCK + v));
    }
  }
}

}  // namespace disagg

#endif
