// Attention of one token, which reads keys and values directly from the paged cache. The queries of
// the heads that share a KV head are computed together. A long context is cut into chunks, always at
// the same positions, whose results are combined at the end: so a result does not depend on threads or
// on other tokens.
#pragma once

#include <cmath>
#include <limits>

#include "attended.h"

namespace disagg {

constexpr int CHUNK = 512;     // positions
constexpr int KEYS_AT_ONCE = 16;
constexpr int KEYS_IN_REGISTERS = HAS_32_REGISTERS ? KEYS_AT_ONCE : 4;  // whose scores are summed
constexpr int QUERIES_AT_ONCE = 4;
// Positions that are prefetched into the L2 cache. Without that, a core with AMX reads memory at half
// its speed, because it waits for each run; a Zen 4 does not need it.
#ifdef __AMX_BF16__
constexpr int POSITIONS_AHEAD = 64;
#else
constexpr int POSITIONS_AHEAD = 0;
#endif

// The result of attention over one chunk for each query: sums of values weighted by
// e^(score - peak), and the sum of these weights.
struct Partial {
  float* sums;    // [num_queries, head_dim]
  float* peaks;   // [num_queries]
  float* totals;  // [num_queries]
};

// The 16 sums over the lanes of 16 vectors.
inline Floats sums_of_lanes(Floats (&v)[LANES]) {
  // Each round halves the number of vectors: the lanes of two are added crosswise into one.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Floats low = unpack_low(v[2 * i], v[2 * i + 1]);
    v[i] = low + unpack_high(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Floats one = v[2 * i], other = v[2 * i + 1];
    const Floats low = low_pairs(one, other);
    v[i] = low + high_pairs(one, other);
  }
  // Now v[i] has, in each quarter, the sums of vectors 4 i .. 4 i + 3 over that quarter.
  const Floats ab = even_quarters(v[0], v[1]) + odd_quarters(v[0], v[1]);
  const Floats cd = even_quarters(v[2], v[3]) + odd_quarters(v[2], v[3]);
  return even_quarters(ab, cd) + odd_quarters(ab, cd);
}

// Scores of one query with 16 keys. For the usual head sizes, all offsets are compile-time constants.
template <int head_dim>
inline Floats scores_of(const bf16* query, const bf16* keys) {
  Floats sums[LANES];
#pragma GCC unroll 4
  for (int first = 0; first < KEYS_AT_ONCE; first += KEYS_IN_REGISTERS) {
#pragma GCC unroll 16
    for (int j = first; j < first + KEYS_IN_REGISTERS; ++j) sums[j] = zeros();
#pragma GCC unroll 4
    for (int d = 0; d < head_dim; d += 2 * LANES) {
      const Words some = load_words(query + d);
#pragma GCC unroll 16
      for (int j = first; j < first + KEYS_IN_REGISTERS; ++j)
        sums[j] = dot_pairs(sums[j], some, load_words(keys + j * head_dim + d));
    }
  }
  return sums_of_lanes(sums);
}

// The same for any head size and for fewer keys; lanes beyond `num_keys` are undefined.
inline Floats scores_of(const bf16* query, const bf16* keys, int num_keys, int head_dim) {
  if (num_keys == KEYS_AT_ONCE && head_dim == 64) return scores_of<64>(query, keys);
  if (num_keys == KEYS_AT_ONCE && head_dim == 128) return scores_of<128>(query, keys);
  Floats sums[LANES];
#pragma GCC unroll 4
  for (int first = 0; first < KEYS_AT_ONCE; first += KEYS_IN_REGISTERS) {
#pragma GCC unroll 16
    for (int j = first; j < first + KEYS_IN_REGISTERS; ++j) sums[j] = zeros();
    if (first >= num_keys) continue;
    for (int d = 0; d < head_dim; d += 2 * LANES) {
      const Mask mask = first_lanes((head_dim - d) / 2);
      const Words some = load_words(query + d, mask);
#pragma GCC unroll 16
      for (int j = first; j < first + KEYS_IN_REGISTERS; ++j) {
        const bf16* key = keys + int64_t(j < num_keys ? j : 0) * head_dim;
        sums[j] = dot_pairs(sums[j], some, load_words(key + d, mask));
      }
    }
  }
  return sums_of_lanes(sums);
}

// Adds values, weighted, to the sums of up to 4 queries: num_vectors * 16 dimensions from `first`.
template <int num_queries, int num_vectors>
inline void add_values(const float* weights, const bf16* values, int num_keys, int head_dim,
                       float* sums) {
  Floats acc[num_queries][num_vectors];
#pragma GCC unroll 4
  for (int q = 0; q < num_queries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v)
      acc[q][v] = load(sums + q * head_dim + v * LANES);
  for (int j = 0; j < num_keys; ++j) {
    Floats wide[num_vectors];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) wide[v] = load(values + int64_t(j) * head_dim + v * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < num_queries; ++q) {
      const Floats weight = broadcast(weights[q * CHUNK + j]);
#pragma GCC unroll 4
      for (int v = 0; v < num_vectors; ++v) acc[q][v] = fma(weight, wide[v], acc[q][v]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < num_queries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v)
      store(sums + q * head_dim + v * LANES, acc[q][v]);
}

template <int num_queries>
inline void add_values(const float* weights, const bf16* values, int num_keys, int head_dim,
                       float* sums) {
  constexpr int AT_ONCE = vectors_at_once(num_queries, 4);
  int d = 0;
  for (; d + AT_ONCE * LANES <= head_dim; d += AT_ONCE * LANES)
    add_values<num_queries, AT_ONCE>(weights, values + d, num_keys, head_dim, sums + d);
  for (; d < head_dim; d += LANES)
    add_values<num_queries, 1>(weights, values + d, num_keys, head_dim, sums + d);
}

inline void add_values(const float* weights, const bf16* values, int num_queries, int num_keys,
                       int head_dim, float* sums) {
  for (int q = 0; q < num_queries; q += QUERIES_AT_ONCE) {
    const float* its_weights = weights + q * CHUNK;
    float* its_sums = sums + q * head_dim;
    switch (num_queries - q) {
      case 1: add_values<1>(its_weights, values, num_keys, head_dim, its_sums); break;
      case 2: add_values<2>(its_weights, values, num_keys, head_dim, its_sums); break;
      case 3: add_values<3>(its_weights, values, num_keys, head_dim, its_sums); break;
      default: add_values<4>(its_weights, values, num_keys, head_dim, its_sums); break;
    }
  }
}

// Scores become weights e^(score - peak). Returns their sum, and the largest score in `peak`.
inline float softmax(float* scores, int num_keys, float* peak) {
  Floats largest = broadcast(-std::numeric_limits<float>::infinity());
  for (int j = 0; j < num_keys; j += LANES)
    largest = select(lanes_of(first_lanes(num_keys - j)), larger(largest, load(scores + j)),
                     largest);
  *peak = largest_of(largest);
  const Floats subtracted = broadcast(*peak);
  Floats total = zeros();
  for (int j = 0; j < num_keys; j += LANES) {
    const Floats weights = exponential(load(scores + j) - subtracted);
    store(scores + j, weights);
    total = select(lanes_of(first_lanes(num_keys - j)), total + weights, total);
  }
  return sum_of(total);
}

// Attention over the positions [begin, end) of a sequence, which are in one chunk. Memory: scores
// [group, CHUNK], widened [KEYS_AT_ONCE, head_dim].
inline void attend_chunk(const Attended& given, const KVPages& cache, const int32_t* blocks,
                         int64_t token, int kv_head, int begin, int end, float* scores,
                         bf16* widened, const Partial& out) {
  const int num_queries = given.group(), dim = given.head_dim;
  const bf16* queries = given.queries(token, kv_head);
  // Always inlined, because gcc omits calls of functions that only prefetch.
  auto bring_closer = [&](Half half, int position, int count) __attribute__((always_inline)) {
    if (position >= end && half == KEYS) {  // after the last keys come the first values
      half = VALUES;
      position -= end - begin;
    }
    if (position >= end) return;
    const int64_t vector_nbytes = cache.vector_nbytes(dim);
    const int64_t block = blocks[position / cache.block_size];
    const uint8_t* from = cache.page(block, given.place.layer, half, kv_head) +
                          position % cache.block_size * vector_nbytes;
    for (int64_t i = 0; i < count * vector_nbytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
  };
  // Calls work(vectors, scales or null, first score, count) for runs of up to 16 keys or values.
  auto for_runs = [&](Half half, auto&& work) {
    cache.for_runs(blocks, given.place.layer, half, kv_head, begin, end, KEYS_AT_ONCE,
                   [&](const uint8_t* page, int offset, int position, int count) {
                     if (POSITIONS_AHEAD > 0) bring_closer(half, position + POSITIONS_AHEAD, count);
                     work(cache.widened(page, offset, count, dim, widened),
                          cache.scales(page, offset), scores + position - begin, count);
                   });
  };
  for_runs(KEYS, [&](const bf16* keys, const float* scales, float* its_scores, int count) {
    for (int q = 0; q < num_queries; ++q) {
      Floats some = scores_of(queries + q * dim, keys, count, dim);
      const Mask mask = first_lanes(count);
      if (scales != nullptr) some = some * load(scales, mask);
      store(its_scores + q * CHUNK, capped(some, given.scale, given.cap), mask);
    }
  });
  for (int q = 0; q < num_queries; ++q)
    out.totals[q] = softmax(scores + q * CHUNK, end - begin, &out.peaks[q]);
  memset(out.sums, 0, sizeof(float) * num_queries * dim);
  for_runs(VALUES, [&](const bf16* values, const float* scales, float* weights, int count) {
    if (scales != nullptr) {
      const Mask mask = first_lanes(count);
      const Floats factors = load(scales, mask);
      for (int q = 0; q < num_queries; ++q) {
        const Floats scaled = load(weights + q * CHUNK, mask) * factors;
        store(weights + q * CHUNK, scaled, mask);
      }
    }
    add_values(weights, values, num_queries, count, dim, out.sums);
  });
}

// Combines the chunks of a token, which `part(i)` returns, to rounded values in `given.out`.
template <class Part>
inline void join(const Attended& given, int64_t token, int kv_head, int num_chunks, Part&& part) {
  for (int q = 0; q < given.group(); ++q) {
    const int head = kv_head * given.group() + q;
    float peak = part(0).peaks[q], total = 0.0f;
    for (int c = 1; c < num_chunks; ++c) peak = std::fmax(peak, part(c).peaks[q]);
    if (given.sinks != nullptr) {
      peak = std::fmax(peak, given.sinks[head]);
      total = std::exp(given.sinks[head] - peak);
    }
    for (int c = 0; c < num_chunks; ++c) {  // from here on, the chunk's weight
      part(c).peaks[q] = std::exp(part(c).peaks[q] - peak);
      total += part(c).totals[q] * part(c).peaks[q];
    }
    for (int d = 0; d < given.head_dim; d += LANES) {
      Floats sums = zeros();
      for (int c = 0; c < num_chunks; ++c) {
        const Floats weight = broadcast(part(c).peaks[q] / total);
        sums = fma(weight, load(part(c).sums + q * given.head_dim + d), sums);
      }
      store(given.out.at(token, head * given.head_dim + d), sums);
    }
  }
}

}  // namespace disagg
