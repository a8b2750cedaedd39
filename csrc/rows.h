// Rows of activations: one after the other, or in the tiles that AMX reads.
#pragma once

#include "vectors.h"

namespace disagg {

constexpr int TILE_ROWS = 16;
constexpr int TILE_DEPTH = 32;  // numbers of bfloat16 in a row of a tile
constexpr int TILE_SIZE = TILE_ROWS * TILE_DEPTH;

// Rounds `count` up to a multiple.
constexpr int filled(int count, int multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// The number of rows that products may read if there are `num_rows`.
constexpr int filled_rows(int num_rows) { return filled(num_rows, TILE_ROWS); }

// The beginning of a tile, and the distance of its rows in bytes.
struct TilePlace {
  const void* at;
  int64_t stride;
};

// Plain rows are one after the other, as pairs of numbers; an incomplete pair is padded with a zero.
// The tiles of 16 tiled rows are contiguous, with those of the first columns first. Their rows and
// columns are padded: the contents of padding rows do not matter, and padding columns are zeros.
struct Rows {
  bf16* base;
  int32_t num_columns;
  bool is_tiled;

  int64_t num_filled_columns() const { return filled(num_columns, is_tiled ? TILE_DEPTH : 2); }
  // 16 numbers of a row, from a multiple of 16 on.
  bf16* at(int64_t row, int column) const {
    if (!is_tiled) return base + row * num_filled_columns() + column;
    const int64_t tile_row = row / TILE_ROWS * TILE_ROWS;
    const int64_t first = tile_row * num_filled_columns() + int64_t(column / TILE_DEPTH) * TILE_SIZE;
    return base + first + row % TILE_ROWS * TILE_DEPTH + column % TILE_DEPTH;
  }
  // Of tiled rows. `row` and `column` are multiples of a tile's size.
  TilePlace place(int64_t row, int column) const {
    return {base + row * num_filled_columns() + int64_t(column) * TILE_ROWS,
            TILE_DEPTH * sizeof(bf16)};
  }
};

}  // namespace disagg
