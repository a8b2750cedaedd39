// Products of some rows with some columns of a panel, over some numbers of each. This is the part of
// larger products whose sums stay in registers.
#pragma once

#include "vectors.h"

namespace disagg {

constexpr int PANEL = 64;         // columns
constexpr int BLOCK_DEPTH = 256;  // numbers of each row, so many that they stay in the L1 cache

// A `fetch` that prefetches nothing.
constexpr auto no_fetch = [](auto...) {};

#ifdef __AVX512BF16__

// The part of a row that products read, as pairs of bfloat16.
using Number = uint32_t;
constexpr int NUMBERS_OF_PAIR = 1;

template <int>
inline Words columns_at(const uint32_t* pairs) {
  return load_words(pairs);
}

inline void add_product(Floats& acc, Words columns, Number number) {
  acc = dot_pairs(acc, columns, broadcast_word(number));
}

#else

// The rows are widened once for all columns, so that a product has no instruction to widen a row.
using Number = float;
constexpr int NUMBERS_OF_PAIR = 2;

// x: rows of bfloat16, `stride` numbers apart; out: [num_rows, BLOCK_DEPTH].
inline void widen_rows(const bf16* x, int64_t stride, int num_rows, int count, float* out) {
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < count; i += LANES)
      store(out + r * BLOCK_DEPTH + i, load(x + r * stride + i, first_lanes(count - i)));
}

// The first numbers of pairs, or the second ones.
template <int which>
[[gnu::always_inline]] inline Floats columns_at(const uint32_t* pairs) {
  return which == 0 ? low_of(load_words(pairs)) : high_of(load_words(pairs));
}

[[gnu::always_inline]] inline void add_product(Floats& acc, Floats columns, Number number) {
  add_product(acc, columns, broadcast(number));
}

#endif

// Adds to `own`, for one number of each pair.
template <int which, int num_rows, int num_vectors>
[[gnu::always_inline]] inline void add_products(const uint32_t* weight, const Number* x,
                                                int64_t stride,
                                                Floats (&own)[num_rows][num_vectors]) {
  decltype(columns_at<which>(weight)) columns[num_vectors];
#pragma GCC unroll 4
  for (int v = 0; v < num_vectors; ++v) columns[v] = columns_at<which>(weight + v * LANES);
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) add_product(own[r][v], columns[v], x[r * stride]);
}

// Adds to `sums`, [num_rows, PANEL], the products of `num_rows` rows and `num_vectors` * 16 columns,
// over `num_pairs` pairs of each. The numbers of a row are contiguous, and rows are `stride` numbers
// apart. `fetch(k, columns)` may prefetch what is read after the `k`th pair.
template <int num_rows, int num_vectors, class Fetch>
inline void block_tile(const uint32_t* weight, const Number* x, int64_t stride, int num_pairs,
                       float* sums, Fetch&& fetch) {
  Floats own[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) own[r][v] = load(sums + r * PANEL + v * LANES);
  for (int k = 0; k < num_pairs; ++k, weight += PANEL, x += NUMBERS_OF_PAIR) {
    fetch(k, weight);
    add_products<0>(weight, x, stride, own);
    if constexpr (NUMBERS_OF_PAIR > 1) add_products<1>(weight, x + 1, stride, own);
  }
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) store(sums + r * PANEL + v * LANES, own[r][v]);
}

}  // namespace disagg
