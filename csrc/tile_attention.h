// Attention of several queries of a sequence over its keys and values in the paged cache, including
// those of the step itself. Keys are read in tiles that begin at multiples of KEY_TILE, whatever the
// queries are, and each query has its own sums. So a result does not depend on how a prompt was cut,
// on other queries or on threads. The softmax is computed tile by tile, as in FlashAttention
// (arXiv 2205.14135).
#pragma once

#include <cmath>
#include <limits>

#include "amx.h"
#include "attended.h"
#include "buffer.h"
#include "key_tile.h"

namespace disagg {

constexpr int ROWS_OF_ITEM = 256;  // queries times heads that share packed keys and values
constexpr float LOG2_E = 1.44269504f;
constexpr float HEADROOM = 8.0f;  // weights are at most 2 to the power of this

// The memory of one thread. A row is a query of one head; `depth` is a head's size, padded with zeros
// to a multiple of TILE_DEPTH.
struct TileScratch {
  Buffer<Activation> queries;  // [ROWS_OF_ITEM, depth]
  Buffer<float> sums;       // [ROWS_OF_ITEM, head_dim], of weighted values
  Buffer<float> peaks;      // [ROWS_OF_ITEM]: scores times log2(e) that weigh 1
  Buffer<float> totals;     // [ROWS_OF_ITEM, LANES], of weights
  Buffer<uint32_t> keys;    // [depth / 2, KEY_TILE]: pairs of a key's neighbours
  Buffer<uint32_t> values;  // [panels of head_dim, KEY_PAIRS, PANEL]: pairs of neighbouring keys
  Buffer<bf16> widened;     // [KEY_TILE, head_dim]
  float key_scales[KEY_TILE], value_scales[KEY_TILE];

  bool hold(int num_rows, int64_t dim, int64_t depth) {
    const int64_t num_panels = (dim + PANEL - 1) / PANEL;
    if (!queries.hold(filled_rows(num_rows) * depth) || !sums.hold(filled_rows(num_rows) * dim) ||
        !peaks.hold(num_rows) || !totals.hold(num_rows * LANES) ||
        !keys.hold(depth / 2 * KEY_TILE) || !values.hold(num_panels * KEY_PAIRS * PANEL) ||
        !widened.hold(KEY_TILE * dim))
      return false;
    if (depth > dim) {  // nothing else writes the padding
      memset(queries.get(), 0, sizeof(Activation) * filled_rows(num_rows) * depth);
      memset(keys.get(), 0, sizeof(uint32_t) * depth / 2 * KEY_TILE);
    }
    return true;
  }
};

// The attention of some queries of one sequence, with the heads that share a KV head.
class TileAttention {
 public:
  TileAttention(const Attended& given, const KVPages& cache, TileScratch& own)
      : given_(given), cache_(cache), own_(own) {}

  static int depth(const Attended& given) { return filled(given.head_dim, TILE_DEPTH); }
  static int queries_of_item(const Attended& given) {
    return given.group() < ROWS_OF_ITEM ? ROWS_OF_ITEM / given.group() : 1;
  }

  // Tokens `begin` to `end` of the step.
  void attend(const Sequence& sequence, int begin, int end, int kv_head) {
    const int num_rows = (end - begin) * group(), position = sequence.position(begin);
    const int end_key = sequence.position(end);
    begin_rows(begin, end - begin, kv_head);
    int key = 0;
    if (given_.window > 0 && position >= given_.window) key = position - given_.window + 1;
    for (key = key / KEY_TILE * KEY_TILE; key < end_key; key += KEY_TILE) {
      pack_tile(sequence, kv_head, key, end_key);
      const int first = key > position ? (key - position) * group() : 0;  // that sees any of them
      attend_rows(first, num_rows, position, key);
    }
    end_rows(begin, end - begin, kv_head);
  }

 private:
  int group() const { return given_.group(); }
  int depth() const { return depth(given_); }

  void begin_rows(int begin, int num_queries, int kv_head) {
    const int dim = given_.head_dim, size = group() * dim;
    for (int i = 0; i < num_queries; ++i)
      for (int g = 0; g < group(); ++g)
        copy_row(given_.queries(begin + i, kv_head) + g * dim, dim,
                 own_.queries.get() + int64_t(i * group() + g) * depth());
    memset(own_.sums.get(), 0, sizeof(float) * num_queries * size);
    memset(own_.totals.get(), 0, sizeof(float) * num_queries * group() * LANES);
    for (int r = 0; r < num_queries * group(); ++r) {
      float peak = -std::numeric_limits<float>::infinity();
      if (given_.sinks != nullptr) {
        peak = LOG2_E * given_.sinks[kv_head * group() + r % group()];
        own_.totals.get()[r * LANES] = 1.0f;
      }
      own_.peaks.get()[r] = peak;
    }
  }

  // The keys `first` to `first` + KEY_TILE, up to `end`, and their values.
  void pack_tile(const Sequence& sequence, int kv_head, int first, int end) {
    const int dim = given_.head_dim;
    const bf16* vectors[KEY_TILE];
    auto find = [&](Half half, float* scales) {
      for (int i = 0; i < KEY_TILE; ++i) vectors[i] = nullptr, scales[i] = 0.0f;
      cache_.for_runs(
          sequence.blocks(given_.place), given_.place.layer, half, kv_head, first,
          end < first + KEY_TILE ? end : first + KEY_TILE, KEY_TILE,
          [&](const uint8_t* page, int offset, int position, int count) {
            const int i = position - first;
            const bf16* found =
                cache_.widened(page, offset, count, dim, own_.widened.get() + int64_t(i) * dim);
            const float* its_scales = cache_.scales(page, offset);
            if (its_scales != nullptr) memcpy(scales + i, its_scales, sizeof(float) * count);
            for (int j = 0; j < count; ++j) vectors[i + j] = found + int64_t(j) * dim;
          });
    };
    find(KEYS, own_.key_scales);
    pack_keys(vectors, dim, own_.keys.get());
    find(VALUES, own_.value_scales);
    pack_values(vectors, dim, own_.values.get());
  }

  // Rows `first` to `end` see some keys. `position` is that of row 0, `key` that of key 0.
  void attend_rows(int first, int end, int position, int key) {
    // Rows before `first` see none of these keys, and do not change.
    for (int begin = first / TILE_ROWS * TILE_ROWS; begin < end; begin += TILE_ROWS) {
      alignas(64) float scores[TILE_ROWS][KEY_TILE];
      alignas(64) Activation weights[TILE_ROWS][KEY_TILE];
      const int num_rows = end - begin < TILE_ROWS ? end - begin : TILE_ROWS;
      score(begin, num_rows, scores);
      if (cache_.scales_offset != 0) scale_scores(num_rows, scores);
      if (given_.cap > 0) cap_scores(num_rows, scores);
      const int from = position + begin / group(), to = position + (begin + num_rows - 1) / group();
      if (!see_all(from, to, key)) hide_scores(begin, num_rows, position - key, scores);
      weigh(begin, num_rows, scores, weights);
      add(begin, num_rows, weights);
    }
  }

#ifdef __AMX_BF16__
  // Columns of a panel that was just packed.
  template <int num_vectors>
  static TileColumns<num_vectors> near_columns(const uint32_t* panel) {
    TileColumns<num_vectors> columns{{}, PANEL * sizeof(uint32_t), false};
    for (int v = 0; v < num_vectors; ++v) columns.of[v] = panel + v * LANES;
    return columns;
  }

  // Queries times keys, of up to 16 rows.
  void score(int begin, int, float (*scores)[KEY_TILE]) {
    const int64_t stride = depth() * int64_t(sizeof(bf16));
    const TileRows queries{own_.queries.get() + int64_t(begin) * depth(), stride, depth(), nullptr};
    tile_product(queries, near_columns<4>(own_.keys.get()), scores[0]);
  }

  // Weights times values, added to the rows' sums.
  void add(int begin, int, const Activation (*weights)[KEY_TILE]) {
    const int dim = given_.head_dim;
    const TileRows rows{weights[0], sizeof weights[0], KEY_TILE, nullptr};
    in_panels([&](int d, const uint32_t* columns, auto num_vectors) {
      tile_product<num_vectors(), true>(rows, near_columns<num_vectors()>(columns),
                                        own_.sums.get() + int64_t(begin) * dim + d,
                                        dim * int64_t(sizeof(float)));
    });
  }
#else
  void score(int begin, int num_rows, float (*scores)[KEY_TILE]) {
    const int num_pairs = depth() / 2;
    in_tiles(num_rows, [&](int, int first, auto size) {
      const Number* queries = numbers_of(own_.queries.get() + int64_t(begin + first) * depth());
      tile<size(), 4>(own_.keys.get(), queries, num_pairs * NUMBERS_OF_PAIR, num_pairs, no_fetch,
                      [&](int r, int v, Floats sums) {
                        store(&scores[first + r][v * LANES], sums);
                      });
    });
  }

  void add(int begin, int num_rows, const Activation (*weights)[KEY_TILE]) {
    in_panels([&](int d, const uint32_t* columns, auto num_vectors) {
      in_tiles(num_rows, [&](int, int first, auto size) {
        float* sums = own_.sums.get() + int64_t(begin + first) * given_.head_dim + d;
        tile<size(), num_vectors()>(
            columns, numbers_of(weights[first]), KEY_PAIRS * NUMBERS_OF_PAIR, KEY_PAIRS, no_fetch,
            [&](int r, int v, Floats some) {
              float* at = sums + int64_t(r) * given_.head_dim + v * LANES;
              store(at, load(at) + some);
            });
      });
    });
  }
#endif

  // Calls `work(first dimension, its column of values, vectors)` for all dimensions of a head; the
  // number of vectors is a type, so that the compiler makes code for each number.
  template <class Work>
  void in_panels(Work&& work) {
    auto column = [&](int d) {
      return own_.values.get() + int64_t(d / PANEL) * KEY_PAIRS * PANEL + d % PANEL;
    };
    int d = 0;
    for (; d + PANEL <= given_.head_dim; d += PANEL)
      work(d, column(d), std::integral_constant<int, 4>());
    for (; d < given_.head_dim; d += LANES)
      work(d, column(d), std::integral_constant<int, 1>());
  }

  void scale_scores(int num_rows, float (*scores)[KEY_TILE]) {
    for (int r = 0; r < num_rows; ++r)
      for (int k = 0; k < KEY_TILE; k += LANES) {
        const Floats scales = load(own_.key_scales + k);
        store(scores[r] + k, load(scores[r] + k) * scales);
      }
  }

  // So that they are capped once they are multiplied by the scale.
  void cap_scores(int num_rows, float (*scores)[KEY_TILE]) {
    const float scale = given_.scale;
    for (int r = 0; r < num_rows; ++r)
      for (int k = 0; k < KEY_TILE; k += LANES)
        store(scores[r] + k, capped(load(scores[r] + k), scale, given_.cap) / broadcast(scale));
  }

  // Whether tokens at all positions `from` to `to` see all keys of the tile at `key`.
  bool see_all(int from, int to, int key) const {
    return key + KEY_TILE - 1 <= from && (given_.window <= 0 || key > to - given_.window);
  }

  // Scores of keys that a row does not see become -infinity. `position` is that of row 0, counted
  // from the first key.
  void hide_scores(int begin, int num_rows, int position, float (*scores)[KEY_TILE]) const {
    for (int r = 0; r < num_rows; ++r) {
      const int end = position + (begin + r) / group() + 1;
      const int first = given_.window > 0 ? end - given_.window : 0;
      for (int k = 0; k < KEY_TILE; k += LANES) {
        const Mask seen = first_lanes(end - k) & ~first_lanes(first - k);
        const Floats lowest = broadcast(-std::numeric_limits<float>::infinity());
        store(scores[r] + k, select(lanes_of(seen), load(scores[r] + k), lowest));
      }
    }
  }

  // Weights 2^(score * scale - peak) of up to 16 rows, rounded to bfloat16. A row's peak follows its
  // largest score only when that is HEADROOM above it, so sums are rarely rescaled.
  void weigh(int begin, int num_rows, const float (*scores)[KEY_TILE],
             Activation (*weights)[KEY_TILE]) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    const Floats scale = broadcast(LOG2_E * given_.scale);
    float* peaks = own_.peaks.get() + begin;
    const Mask rows = first_lanes(num_rows);
    const Floats before = load(peaks, rows);
    const Floats largest = row_maxima(scores) * scale;
    const Floats highest = before + broadcast(HEADROOM);
    const Mask grown = rows & mask_of(less(highest, largest));
    if (grown != 0) {
      store(peaks, largest, grown);
      multiply_sums(begin, grown, power_of_two(before - largest));
    }
    const bool has_scales = cache_.scales_offset != 0;
    for (int r = 0; r < num_rows; ++r) {
      // A row that has seen no key yet has scores of -infinity, and weights of 0.
      const Floats less_peak = broadcast(peaks[r] == LOWEST ? 0.0f : -peaks[r]);
      float* totals = own_.totals.get() + int64_t(begin + r) * LANES;
      Floats total = load(totals);
#pragma GCC unroll 4
      for (int k = 0; k < KEY_TILE; k += LANES) {
        Floats some = power_of_two(fma(load(scores[r] + k), scale, less_peak));
        total = total + some;
        if (has_scales) some = some * load(own_.value_scales + k);
        store_rounded(weights[r] + k, some);
      }
      store(totals, total);
    }
  }

  // Multiplies the sums of the rows in the mask by their factors.
  void multiply_sums(int begin, Mask rows, Floats factors) {
    alignas(64) float its_factors[LANES];
    store(its_factors, factors);
    auto multiply = [](float* at, Floats factor) {
      store(at, load(at) * factor);
    };
    for (int r = 0; r < LANES; ++r) {
      if ((rows >> r & 1) == 0) continue;
      const int64_t row = begin + r;
      const Floats factor = broadcast(its_factors[r]);
      multiply(own_.totals.get() + row * LANES, factor);
      for (int d = 0; d < given_.head_dim; d += LANES)
        multiply(own_.sums.get() + row * given_.head_dim + d, factor);
    }
  }

  void end_rows(int begin, int num_queries, int kv_head) {
    const int dim = given_.head_dim;
    for (int i = 0; i < num_queries; ++i)
      for (int g = 0; g < group(); ++g) {
        const int row = i * group() + g;
        const float total = sum_of(load(own_.totals.get() + row * LANES));
        const Floats inverse = broadcast(1.0f / total);
        const float* sums = own_.sums.get() + int64_t(row) * dim;
        for (int d = 0; d < dim; d += LANES)
          store(given_.out.at(begin + i, (kv_head * group() + g) * dim + d), load(sums + d) * inverse);
      }
  }

  const Attended& given_;
  const KVPages& cache_;
  TileScratch& own_;
};

}  // namespace disagg
