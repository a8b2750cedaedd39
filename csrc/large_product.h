// Products of many rows with a weight in panels. A result is, to the bit, that of a product of a few
// rows (`tiles_product` with AMX, else `product`), and does not depend on the other rows.
#pragma once

#include "amx.h"
#include "product.h"
#include "rows.h"

namespace disagg {

constexpr int BLOCK_DEPTH = 256;   // numbers of each row that stay in the L1 cache meanwhile
constexpr int MOST_COLUMNS = 128;  // of an item: their part of a weight stays in the L2 cache

// The columns `first` to `end` of a weight, of which there are at most MOST_COLUMNS. `first` is a
// panel's.
struct SomeColumns {
  const Matrix& matrix;
  int32_t first, end;
  const uint32_t* widened;  // of a weight of fewer bits: its panels, as widen_panels makes them

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
using ProductRows = TiledRows;

inline TileColumns<2> block_of(const SomeColumns& columns, int column) {
  if (columns.widened == nullptr) return columns_of<2>(columns.matrix, column);
  const uint32_t* at = columns.widened_panel(column) + (column - columns.first) % PANEL;
  return {{at, at + LANES}, PANEL * sizeof(uint32_t), false};
}

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
      tile_product_32(x, row, block_of(columns, column), k, next, block, BLOCK * sizeof(float));
      if (next < depth) continue;
      for (int r = 0; r < num_rows; ++r)
        for (int v = 0; v < BLOCK && column + v < end; v += LANES)
          take(r, column + v, _mm512_load_ps(block + r * BLOCK + v));
    }
  }
}

#else

constexpr int BLOCK_ROWS = 8 * MOST_ROWS;
constexpr int BLOCK_SIZE = BLOCK_ROWS * PANEL;
constexpr int ROWS_OF_PRODUCT = 3 * BLOCK_ROWS;
using ProductRows = PlainRows;

#ifdef __AVX512BF16__

using Pair = uint32_t;

// What products of a block of rows read: the rows themselves.
struct BlockRows {
  const Pair* pairs;
  int64_t stride;  // in pairs

  BlockRows(const PlainRows& x, int64_t row, int, int first_pair, int)
      : pairs(x.pairs(row) + first_pair), stride(x.num_filled_columns() / 2) {}
};

struct Columns {
  __m512i pairs;
  explicit Columns(const uint32_t* from) : pairs(_mm512_loadu_si512(from)) {}
};

struct RowPair {
  __m512i pair;
  explicit RowPair(const Pair& from) : pair(_mm512_set1_epi32(static_cast<int>(from))) {}
  __m512 times(const Columns& columns, __m512 acc) const {
    return dot_pairs(acc, columns.pairs, pair);
  }
};

#else

struct Pair {
  float low, high;
};

// The rows widened once for all columns, so that a product has no instruction to widen a row.
struct BlockRows {
  alignas(64) float numbers[BLOCK_ROWS * BLOCK_DEPTH];
  const Pair* pairs = reinterpret_cast<const Pair*>(numbers);
  static constexpr int64_t stride = BLOCK_DEPTH / 2;

  BlockRows(const PlainRows& x, int64_t row, int num_rows, int first_pair, int num_pairs) {
    for (int r = 0; r < num_rows; ++r) {
      const auto* from = reinterpret_cast<const bf16*>(x.pairs(row + r) + first_pair);
      for (int i = 0; i < 2 * num_pairs; i += LANES)
        _mm512_store_ps(numbers + r * BLOCK_DEPTH + i,
                        load(from + i, first_lanes(2 * num_pairs - i)));
    }
  }
};

struct Columns {
  __m512 low, high;
  explicit Columns(const uint32_t* from) {
    const __m512i pairs = _mm512_loadu_si512(from);
    low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF0000)));
  }
};

// In the order of `dot_pairs`.
struct RowPair {
  const Pair& pair;
  explicit RowPair(const Pair& from) : pair(from) {}
  __m512 times(const Columns& columns, __m512 acc) const {
    acc = _mm512_fmadd_ps(columns.low, _mm512_set1_ps(pair.low), acc);
    return _mm512_fmadd_ps(columns.high, _mm512_set1_ps(pair.high), acc);
  }
};

#endif

// Sums of `num_rows` rows and a panel's columns, over `num_pairs` pairs of each; unless they are the
// first, what is in `sums`, [num_rows, PANEL], is added to. The pairs of a row lie together, and rows
// `stride` pairs apart.
template <int num_rows, bool is_first>
inline void block_tile(const uint32_t* weight, const Pair* x, int64_t stride, int num_pairs,
                       float* sums) {
  constexpr int NUM_VECTORS = PANEL / LANES;
  __m512 own[num_rows][NUM_VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECTORS; ++v)
      own[r][v] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * LANES);
  for (int k = 0; k < num_pairs; ++k, weight += PANEL) {
    const Columns columns[NUM_VECTORS] = {Columns(weight), Columns(weight + LANES),
                                          Columns(weight + 2 * LANES), Columns(weight + 3 * LANES)};
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
      const RowPair row(x[r * stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NUM_VECTORS; ++v) own[r][v] = row.times(columns[v], own[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECTORS; ++v) _mm512_store_ps(sums + r * PANEL + v * LANES, own[r][v]);
}

// One copy of the code, for all products.
[[gnu::noinline]] inline void multiply_block(const uint32_t* weight, const Pair* x, int64_t stride,
                                             int num_rows, int num_pairs, bool is_first, float* sums) {
  in_tiles(num_rows, [&](int, int begin, auto size) {
    float* own = sums + begin * PANEL;
    if (is_first)
      block_tile<size(), true>(weight, x + begin * stride, stride, num_pairs, own);
    else
      block_tile<size(), false>(weight, x + begin * stride, stride, num_pairs, own);
  });
}

// The products of up to BLOCK_ROWS rows from `row` on with some columns: `take(row of these, column,
// sums)` gets 16 columns at a time. sums: [MOST_COLUMNS / PANEL, BLOCK_ROWS, PANEL].
template <class Take>
inline void multiply_rows(const SomeColumns& columns, const PlainRows& x, int64_t row, int num_rows,
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
      multiply_block(panel + int64_t(k) * PANEL, rows.pairs, rows.stride, num_rows, count, k == 0,
                     block);
      if (k + count < num_pairs) continue;
      for (int r = 0; r < num_rows; ++r)
        for (int v = 0; v < PANEL && column + v < end; v += LANES)
          take(r, column + v, _mm512_load_ps(block + r * PANEL + v));
    }
  }
}

#endif

}  // namespace disagg
