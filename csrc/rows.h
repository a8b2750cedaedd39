// Rows of activations: one behind the other, or in tiles as AMX reads them.
#pragma once

#include "vectors.h"

namespace disagg {

constexpr int TILE_ROWS = 16;
constexpr int TILE_DEPTH = 32;  // numbers of bfloat16 in a row of a tile
constexpr int TILE_SIZE = TILE_ROWS * TILE_DEPTH;

// The least multiple that is not below `count`.
constexpr int filled(int count, int multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Rows that products may read of `num_rows`.
constexpr int filled_rows(int num_rows) { return filled(num_rows, TILE_ROWS); }

// Where a tile begins, and how many bytes its rows lie apart.
struct TilePlace {
  const void* at;
  int64_t stride;
};

// The tiles of 16 rows lie together, those of the first columns first. Rows and columns are filled
// up; what stands in the rows that are no rows changes nothing, and in the columns stand zeros.
struct TiledRows {
  bf16* base;
  int32_t num_columns;

  int64_t num_filled_columns() const { return filled(num_columns, TILE_DEPTH); }
  // Both are multiples of a tile's.
  TilePlace place(int64_t row, int column) const {
    return {base + row * num_filled_columns() + int64_t(column) * TILE_ROWS,
            TILE_DEPTH * sizeof(bf16)};
  }
  // 16 columns of a row, from a multiple of 16 on.
  bf16* at(int64_t row, int column) const {
    const int64_t tile_row = row / TILE_ROWS * TILE_ROWS;
    const int64_t first = tile_row * num_filled_columns() + int64_t(column / TILE_DEPTH) * TILE_SIZE;
    return base + first + row % TILE_ROWS * TILE_DEPTH + column % TILE_DEPTH;
  }
};

// The rows lie one behind the other, as pairs of numbers; a pair that is not full has a zero.
struct PlainRows {
  bf16* base;
  int32_t num_columns;

  int64_t num_filled_columns() const { return filled(num_columns, 2); }
  const uint32_t* pairs(int64_t row) const {
    return reinterpret_cast<const uint32_t*>(base + row * num_filled_columns());
  }
  bf16* at(int64_t row, int column) const { return base + row * num_filled_columns() + column; }
};

}  // namespace disagg
