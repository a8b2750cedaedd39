// Products of some rows with some columns of a panel, over some numbers of each. This is the part of
// larger products whose sums stay in registers.
#pragma once

#include "vectors.h"

namespace disagg {

constexpr int PANEL = 64;         // columns
constexpr int BLOCK_DEPTH = 256;  // numbers of each row, so many that they stay in the L1 cache

// A `fetch` that prefetches nothing.
constexpr auto no_fetch = [](auto...) {};

// How products read rows of activations. Without instructions for bfloat16 they are float32 numbers,
// which bfloat16 can represent: a product then has no instruction to widen a row.
#ifdef __AVX512BF16__

constexpr bool HAS_BF16 = true;
using Activation = bf16;
using Number = uint32_t;  // a pair of bfloat16
constexpr int NUMBERS_OF_PAIR = 1;

template <int>
inline Words part_of(Words pairs) {
  return pairs;
}

inline void add_product(Floats& acc, Words columns, Number number) {
  acc = dot_pairs(acc, columns, broadcast_word(number));
}

#else

constexpr bool HAS_BF16 = false;
using Activation = float;
using Number = float;
constexpr int NUMBERS_OF_PAIR = 2;

// The first numbers of pairs, or the second ones.
template <int which, class Pairs>
[[gnu::always_inline]] inline Floats part_of(Pairs pairs) {
  return which == 0 ? low_of(pairs) : high_of(pairs);
}

[[gnu::always_inline]] inline void add_product(Floats& acc, Floats columns, Number number) {
  add_product(acc, columns, broadcast(number));
}

#endif

inline const Number* numbers_of(const Activation* x) { return reinterpret_cast<const Number*>(x); }

// Adds to `own` one part of each pair.
template <int which, int num_rows, int num_vectors, class Pairs>
[[gnu::always_inline]] inline void add_products(const Pairs (&pairs)[num_vectors], const Number* x,
                                                int64_t stride,
                                                Floats (&own)[num_rows][num_vectors]) {
  decltype(part_of<which>(pairs[0])) columns[num_vectors];
#pragma GCC unroll 4
  for (int v = 0; v < num_vectors; ++v) columns[v] = part_of<which>(pairs[v]);
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) add_product(own[r][v], columns[v], x[r * stride + which]);
}

// Adds to `own` the products of pairs of `num_vectors` * 16 columns and a pair of each row. `x` is the
// first row's pair, and rows are `stride` numbers apart.
template <int num_rows, int num_vectors, class Pairs>
[[gnu::always_inline]] inline void add_pairs(const Pairs (&pairs)[num_vectors], const Number* x,
                                             int64_t stride,
                                             Floats (&own)[num_rows][num_vectors]) {
  add_products<0>(pairs, x, stride, own);
  if constexpr (NUMBERS_OF_PAIR > 1) add_products<1>(pairs, x, stride, own);
}

// The same over `num_pairs` pairs of a panel and of each row. `fetch(k, columns)` may prefetch what is
// read after the `k`th pair.
template <int num_rows, int num_vectors, class Fetch>
[[gnu::always_inline]] inline void add_panel(const uint32_t* weight, const Number* x, int64_t stride,
                                             int num_pairs, Floats (&own)[num_rows][num_vectors],
                                             Fetch&& fetch) {
  for (int k = 0; k < num_pairs; ++k, weight += PANEL, x += NUMBERS_OF_PAIR) {
    Words pairs[num_vectors];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) pairs[v] = load_words(weight + v * LANES);
    fetch(k, weight);
    add_pairs(pairs, x, stride, own);
  }
}

// Adds the products of `num_pairs` pairs to `sums`, [num_rows, PANEL].
template <int num_rows, int num_vectors, class Fetch>
inline void block_tile(const uint32_t* weight, const Number* x, int64_t stride, int num_pairs,
                       float* sums, Fetch&& fetch) {
  Floats own[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) own[r][v] = load(sums + r * PANEL + v * LANES);
  add_panel(weight, x, stride, num_pairs, own, fetch);
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) store(sums + r * PANEL + v * LANES, own[r][v]);
}

}  // namespace disagg
