// Attention of one query per sequence to keys and values where they lie in the paged cache.
// Queries of the heads that share a KV head are attended together; a long context is cut into
// chunks, always at the same positions, whose results are put together at the end.
#pragma once

#include <cmath>
#include <limits>

#include "kv_format.h"
#include "vectors.h"

namespace disagg {

constexpr int CHUNK = 512;     // positions
constexpr int KEYS_AT_ONCE = 16;
constexpr int QUERIES_AT_ONCE = 4;
// Positions that are brought into the L2 cache before they are looked at. With AMX, a core that waits for
// each run reads memory at half its speed; a Zen 4 reads as fast without.
#ifdef __AMX_BF16__
constexpr int POSITIONS_AHEAD = 64;
#else
constexpr int POSITIONS_AHEAD = 0;
#endif

// What attention to one chunk gives for each query: sums of values that are weighted by
// e^(score - peak), and the sum of these weights.
struct Partial {
  float* sums;    // [num_queries, head_dim]
  float* peaks;   // [num_queries]
  float* totals;  // [num_queries]
};

// Memory of one thread.
struct AttentionScratch {
  bf16* queries;  // [num_queries, head_dim], turned
  float* scores;  // [num_queries, CHUNK]
  bf16* widened;  // [KEYS_AT_ONCE, head_dim]
};

// The 16 sums over the lanes of 16 vectors.
inline __m512 sums_of_lanes(__m512 (&v)[LANES]) {
  // Each round halves the vectors: lanes of two are added crosswise, and lie in one.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 low = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    v[i] = _mm512_add_ps(low, _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d one = _mm512_castps_pd(v[2 * i]), other = _mm512_castps_pd(v[2 * i + 1]);
    const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(one, other));
    v[i] = _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(one, other)));
  }
  // Now v[i] has, in each quarter, the sums of vectors 4 i .. 4 i + 3 over that quarter.
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88),
                                  _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88),
                                  _mm512_shuffle_f32x4(v[2], v[3], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

// Scores of one query with 16 keys. Of the usual head sizes, all places are known in advance.
template <int head_dim>
inline __m512 scores_of(const bf16* query, const bf16* keys) {
  __m512 sums[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < KEYS_AT_ONCE; ++j) sums[j] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int d = 0; d < head_dim; d += 2 * LANES) {
    const __m512i some = _mm512_loadu_si512(query + d);
#pragma GCC unroll 16
    for (int j = 0; j < KEYS_AT_ONCE; ++j)
      sums[j] = dot_pairs(sums[j], some, _mm512_loadu_si512(keys + j * head_dim + d));
  }
  return sums_of_lanes(sums);
}

// The same of any head size and of fewer keys; lanes beyond `num_keys` mean nothing.
inline __m512 scores_of(const bf16* query, const bf16* keys, int num_keys, int head_dim) {
  if (num_keys == KEYS_AT_ONCE && head_dim == 64) return scores_of<64>(query, keys);
  if (num_keys == KEYS_AT_ONCE && head_dim == 128) return scores_of<128>(query, keys);
  __m512 sums[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < KEYS_AT_ONCE; ++j) sums[j] = _mm512_setzero_ps();
  for (int d = 0; d < head_dim; d += 2 * LANES) {
    const __mmask32 mask = head_dim - d >= 2 * LANES ? 0xFFFFFFFFu : 0x0000FFFFu;
    const __m512i some = _mm512_maskz_loadu_epi16(mask, query + d);
#pragma GCC unroll 16
    for (int j = 0; j < KEYS_AT_ONCE; ++j) {
      const bf16* key = keys + int64_t(j < num_keys ? j : 0) * head_dim;
      sums[j] = dot_pairs(sums[j], some, _mm512_maskz_loadu_epi16(mask, key + d));
    }
  }
  return sums_of_lanes(sums);
}

// Adds values, weighted, to the sums of up to 4 queries: num_vectors * 16 dimensions from `first`.
template <int num_queries, int num_vectors>
inline void add_values(const float* weights, const bf16* values, int num_keys, int head_dim,
                       float* sums) {
  __m512 acc[num_queries][num_vectors];
#pragma GCC unroll 4
  for (int q = 0; q < num_queries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v)
      acc[q][v] = _mm512_loadu_ps(sums + q * head_dim + v * LANES);
  for (int j = 0; j < num_keys; ++j) {
    __m512 wide[num_vectors];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) wide[v] = load(values + int64_t(j) * head_dim + v * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < num_queries; ++q) {
      const __m512 weight = _mm512_set1_ps(weights[q * CHUNK + j]);
#pragma GCC unroll 4
      for (int v = 0; v < num_vectors; ++v) acc[q][v] = _mm512_fmadd_ps(weight, wide[v], acc[q][v]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < num_queries; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v)
      _mm512_storeu_ps(sums + q * head_dim + v * LANES, acc[q][v]);
}

template <int num_queries>
inline void add_values(const float* weights, const bf16* values, int num_keys, int head_dim,
                       float* sums) {
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES)
    add_values<num_queries, 4>(weights, values + d, num_keys, head_dim, sums + d);
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
  __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int j = 0; j < num_keys; j += LANES)
    largest = _mm512_mask_max_ps(largest, first_lanes(num_keys - j), largest,
                                 _mm512_loadu_ps(scores + j));
  *peak = _mm512_reduce_max_ps(largest);
  const __m512 subtracted = _mm512_set1_ps(*peak);
  __m512 total = _mm512_setzero_ps();
  for (int j = 0; j < num_keys; j += LANES) {
    const __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), subtracted));
    _mm512_storeu_ps(scores + j, weights);
    total = _mm512_mask_add_ps(total, first_lanes(num_keys - j), total, weights);
  }
  return _mm512_reduce_add_ps(total);
}

// Attend to the positions [begin, end) of a sequence, which lie in one chunk.
inline void attend(const KVPages& cache, int layer, int kv_head, const int32_t* blocks, int begin,
                   int end, int num_queries, int head_dim, const AttentionScratch& scratch,
                   const Partial& out) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  // Inlined always: gcc leaves out calls of functions that do nothing but prefetch.
  auto bring_closer = [&](Half half, int position, int count) __attribute__((always_inline)) {
    if (position >= end && half == KEYS) {  // behind the last keys come the first values
      half = VALUES;
      position -= end - begin;
    }
    if (position >= end) return;
    const int64_t vector_nbytes = cache.vector_nbytes(head_dim);
    const uint8_t* from = cache.page(blocks[position / cache.block_size], layer, half, kv_head) +
                          position % cache.block_size * vector_nbytes;
    for (int64_t i = 0; i < count * vector_nbytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
  };
  // Calls work(page, offset, at, count) for runs of up to 16 keys or values, `at` counted from `begin`.
  auto for_runs = [&](Half half, auto&& work) {
    for (int position = begin; position < end;) {
      const int offset = position % cache.block_size;
      int count = cache.block_size - offset;
      if (count > end - position) count = end - position;
      if (count > KEYS_AT_ONCE) count = KEYS_AT_ONCE;
      if (POSITIONS_AHEAD > 0) bring_closer(half, position + POSITIONS_AHEAD, count);
      work(cache.page(blocks[position / cache.block_size], layer, half, kv_head), offset,
           position - begin, count);
      position += count;
    }
  };
  for_runs(KEYS, [&](const uint8_t* page, int offset, int at, int count) {
    const bf16* keys = cache.widened(page, offset, count, head_dim, scratch.widened);
    const float* scales = cache.scales(page, offset);
    for (int q = 0; q < num_queries; ++q) {
      __m512 scores = scores_of(scratch.queries + q * head_dim, keys, count, head_dim);
      scores = _mm512_mul_ps(scores, _mm512_set1_ps(scale));
      const __mmask16 mask = first_lanes(count);
      if (scales != nullptr) scores = _mm512_mul_ps(scores, _mm512_maskz_loadu_ps(mask, scales));
      _mm512_mask_storeu_ps(scratch.scores + q * CHUNK + at, mask, scores);
    }
  });
  for (int q = 0; q < num_queries; ++q)
    out.totals[q] = softmax(scratch.scores + q * CHUNK, end - begin, &out.peaks[q]);
  memset(out.sums, 0, sizeof(float) * num_queries * head_dim);
  for_runs(VALUES, [&](const uint8_t* page, int offset, int at, int count) {
    const bf16* values = cache.widened(page, offset, count, head_dim, scratch.widened);
    const float* scales = cache.scales(page, offset);
    float* weights = scratch.scores + at;
    if (scales != nullptr) {
      const __mmask16 mask = first_lanes(count);
      const __m512 factors = _mm512_maskz_loadu_ps(mask, scales);
      for (int q = 0; q < num_queries; ++q) {
        float* own = weights + q * CHUNK;
        const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, own), factors);
        _mm512_mask_storeu_ps(own, mask, scaled);
      }
    }
    add_values(weights, values, num_queries, count, head_dim, out.sums);
  });
}

// Puts the chunks of a sequence together, which `part(i)` gives: [num_queries, head_dim] rounded.
template <class Part>
inline void join(Part&& part, int num_chunks, int num_queries, int head_dim, bf16* out) {
  for (int q = 0; q < num_queries; ++q) {
    float peak = part(0).peaks[q], total = 0.0f;
    for (int c = 1; c < num_chunks; ++c) peak = std::fmax(peak, part(c).peaks[q]);
    for (int c = 0; c < num_chunks; ++c) {  // from here on, the chunk's weight
      part(c).peaks[q] = std::exp(part(c).peaks[q] - peak);
      total += part(c).totals[q] * part(c).peaks[q];
    }
    for (int d = 0; d < head_dim; d += LANES) {
      __m512 sums = _mm512_setzero_ps();
      for (int c = 0; c < num_chunks; ++c) {
        const __m512 weight = _mm512_set1_ps(part(c).peaks[q] / total);
        const __m512 some = _mm512_loadu_ps(part(c).sums + q * head_dim + d);
        sums = _mm512_fmadd_ps(weight, some, sums);
      }
      store(out + q * head_dim + d, sums);
    }
  }
}

}  // namespace disagg
