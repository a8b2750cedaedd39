// Attention of prompts over keys and values in the paged cache, including those of the prompt itself.
// Keys are read in tiles that begin at multiples of KEY_TILE, whatever a prompt's chunks are, and each
// query has its own sums. So a result does not depend on how a prompt was cut, on other queries or on
// threads. The softmax is computed tile by tile, as in FlashAttention (arXiv 2205.14135).
#pragma once

#include <cmath>
#include <limits>

#include "amx.h"
#include "buffer.h"
#include "key_tile.h"
#include "kv_format.h"
#include "model.h"
#include "product.h"
#include "vectors.h"

namespace disagg {

constexpr int ROWS_OF_ITEM = 256;  // queries times heads that share packed keys and values
constexpr float LOG2_E = 1.44269504f;
constexpr float HEADROOM = 8.0f;  // weights are at most 2 to the power of this

// The memory of one thread. A row is a query of one head; `depth` is a head's size, padded with zeros
// to a multiple of TILE_DEPTH.
struct PromptScratch {
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
    memset(queries.get(), 0, sizeof(Activation) * filled_rows(num_rows) * depth);
    memset(keys.get(), 0, sizeof(uint32_t) * depth / 2 * KEY_TILE);
    return true;
  }
};

// Attention of all chunks of a step in one layer, cut into items.
class PromptAttention {
 public:
  // Returns false if there is not enough memory.
  bool prepare(const Prompts& prompts, const KVPages& cache, int num_threads) {
    prompts_ = prompts;
    cache_ = cache;
    return make_room(num_threads);
  }

  // The same for another layer. One thread calls it, while no thread computes attention.
  void set_layer(int layer, int window) {
    prompts_.layer = layer;
    prompts_.window = window;
  }

  int num_items() const { return num_spans_ * prompts_.num_kv_heads; }

  // `thread` must be below the number of prepared threads, and computes one item at a time.
  void attend(int thread, int item) {
    const Span& span = spans_.get()[item / prompts_.num_kv_heads];
    attend(own_[thread], span, item % prompts_.num_kv_heads);
  }

 private:
  // Some queries of a chunk, with the heads of a group; each KV head is a separate item.
  struct Span {
    int32_t chunk, begin, end;  // tokens of the step
  };

  int group() const { return prompts_.num_heads / prompts_.num_kv_heads; }
  int depth() const { return filled(prompts_.head_dim, TILE_DEPTH); }
  int queries_of_item() const { return group() < ROWS_OF_ITEM ? ROWS_OF_ITEM / group() : 1; }

  bool make_room(int num_threads) {
    if (!own_.hold(num_threads)) return false;
    for (int i = 0; i < num_threads; ++i)
      if (!own_[i].hold(queries_of_item() * group(), prompts_.head_dim, depth())) return false;
    int64_t most = 0;
    for (int i = 0; i < prompts_.num_chunks; ++i) {
      const PromptChunk& chunk = prompts_.chunks[i];
      most += (chunk.end - chunk.start) / queries_of_item() + 1;
    }
    if (!spans_.hold(most)) return false;
    list_spans();
    return true;
  }

  // The last queries of a chunk see the most keys, so they come first.
  void list_spans() {
    num_spans_ = 0;
    for (int i = 0; i < prompts_.num_chunks; ++i) {
      const PromptChunk& chunk = prompts_.chunks[i];
      for (int end = chunk.end; end > chunk.start; end -= queries_of_item()) {
        const int begin = end - queries_of_item();
        spans_.get()[num_spans_++] = {i, begin > chunk.start ? begin : chunk.start, end};
      }
    }
  }

  void attend(PromptScratch& own, const Span& span, int kv_head) {
    const PromptChunk& chunk = prompts_.chunks[span.chunk];
    const int num_rows = (span.end - span.begin) * group();
    const int position = chunk.context_len - (chunk.end - span.begin);  // of the first query
    const int end = position + span.end - span.begin;                   // of the keys they see
    begin_rows(own, span, kv_head);
    int key = 0;
    if (prompts_.window > 0 && position >= prompts_.window) key = position - prompts_.window + 1;
    for (key = key / KEY_TILE * KEY_TILE; key < end; key += KEY_TILE) {
      pack_tile(own, chunk, kv_head, key, end);
      const int first = key > position ? (key - position) * group() : 0;  // that sees any of them
      attend_rows(own, first, num_rows, position, key);
    }
    end_rows(own, span, kv_head);
  }

  void begin_rows(PromptScratch& own, const Span& span, int kv_head) {
    const int dim = prompts_.head_dim, size = group() * dim;
    const int64_t stride = int64_t(prompts_.num_heads + 2 * prompts_.num_kv_heads) * dim;
    const int num_queries = span.end - span.begin;
    for (int i = 0; i < num_queries; ++i) {
      const bf16* query = prompts_.qkv + (span.begin + i) * stride + kv_head * size;
      for (int g = 0; g < group(); ++g)
        copy_row(query + g * dim, dim, own.queries.get() + int64_t(i * group() + g) * depth());
    }
    memset(own.sums.get(), 0, sizeof(float) * num_queries * size);
    memset(own.totals.get(), 0, sizeof(float) * num_queries * group() * LANES);
    for (int r = 0; r < num_queries * group(); ++r) {
      float peak = -std::numeric_limits<float>::infinity();
      if (prompts_.sinks != nullptr) {
        peak = LOG2_E * prompts_.sinks[kv_head * group() + r % group()];
        own.totals.get()[r * LANES] = 1.0f;
      }
      own.peaks.get()[r] = peak;
    }
  }

  // The keys `first` to `first` + KEY_TILE, up to `end`, and their values.
  void pack_tile(PromptScratch& own, const PromptChunk& chunk, int kv_head, int first, int end) {
    const int dim = prompts_.head_dim;
    const bf16* vectors[KEY_TILE];
    auto find = [&](Half half, float* scales) {
      for (int i = 0; i < KEY_TILE;) {
        const int position = first + i, offset = position % cache_.block_size;
        if (position >= end) {
          scales[i] = 0.0f;
          vectors[i++] = nullptr;
          continue;
        }
        int count = cache_.block_size - offset;
        if (count > end - position) count = end - position;
        if (count > KEY_TILE - i) count = KEY_TILE - i;
        const int32_t block = chunk.blocks[position / cache_.block_size];
        const uint8_t* page = cache_.page(block, prompts_.layer, half, kv_head);
        const bf16* found =
            cache_.widened(page, offset, count, dim, own.widened.get() + int64_t(i) * dim);
        const float* its_scales = cache_.scales(page, offset);
        if (its_scales != nullptr) memcpy(scales + i, its_scales, sizeof(float) * count);
        for (int j = 0; j < count; ++j) vectors[i + j] = found + int64_t(j) * dim;
        i += count;
      }
    };
    find(KEYS, own.key_scales);
    pack_keys(vectors, dim, own.keys.get());
    find(VALUES, own.value_scales);
    pack_values(vectors, dim, own.values.get());
  }

  // Rows `first` to `end` see some keys. `position` is that of row 0, `key` that of key 0.
  void attend_rows(PromptScratch& own, int first, int end, int position, int key) {
    // Rows before `first` see none of these keys, and do not change.
    for (int begin = first / TILE_ROWS * TILE_ROWS; begin < end; begin += TILE_ROWS) {
      alignas(64) float scores[TILE_ROWS][KEY_TILE];
      alignas(64) Activation weights[TILE_ROWS][KEY_TILE];
      const int num_rows = end - begin < TILE_ROWS ? end - begin : TILE_ROWS;
      score(own, begin, num_rows, scores);
      if (cache_.scales_offset != 0) scale_scores(own, num_rows, scores);
      const int from = position + begin / group(), to = position + (begin + num_rows - 1) / group();
      if (!see_all(from, to, key)) hide_scores(begin, num_rows, position - key, scores);
      weigh(own, begin, num_rows, scores, weights);
      add(own, begin, num_rows, weights);
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
  void score(PromptScratch& own, int begin, int, float (*scores)[KEY_TILE]) {
    const int64_t stride = depth() * int64_t(sizeof(bf16));
    const TileRows queries{own.queries.get() + int64_t(begin) * depth(), stride, depth(), nullptr};
    tile_product(queries, near_columns<4>(own.keys.get()), scores[0]);
  }

  // Weights times values, added to the rows' sums.
  void add(PromptScratch& own, int begin, int, const Activation (*weights)[KEY_TILE]) {
    const int dim = prompts_.head_dim;
    const TileRows rows{weights[0], sizeof weights[0], KEY_TILE, nullptr};
    in_panels(own, [&](int d, const uint32_t* columns, auto num_vectors) {
      tile_product<num_vectors(), true>(rows, near_columns<num_vectors()>(columns),
                                        own.sums.get() + int64_t(begin) * dim + d,
                                        dim * int64_t(sizeof(float)));
    });
  }
#else
  void score(PromptScratch& own, int begin, int num_rows, float (*scores)[KEY_TILE]) {
    const int num_pairs = depth() / 2;
    in_tiles(num_rows, [&](int, int first, auto size) {
      const Number* queries = numbers_of(own.queries.get() + int64_t(begin + first) * depth());
      tile<size(), 4>(own.keys.get(), queries, num_pairs * NUMBERS_OF_PAIR, num_pairs, no_fetch,
                      [&](int r, int v, Floats sums) {
                        store(&scores[first + r][v * LANES], sums);
                      });
    });
  }

  void add(PromptScratch& own, int begin, int num_rows, const Activation (*weights)[KEY_TILE]) {
    in_panels(own, [&](int d, const uint32_t* columns, auto num_vectors) {
      in_tiles(num_rows, [&](int, int first, auto size) {
        float* sums = own.sums.get() + int64_t(begin + first) * prompts_.head_dim + d;
        tile<size(), num_vectors()>(
            columns, numbers_of(weights[first]), KEY_PAIRS * NUMBERS_OF_PAIR, KEY_PAIRS, no_fetch,
            [&](int r, int v, Floats some) {
              float* at = sums + int64_t(r) * prompts_.head_dim + v * LANES;
              store(at, load(at) + some);
            });
      });
    });
  }
#endif

  // Calls `work(first dimension, its column of values, vectors)` for all dimensions of a head; the
  // number of vectors is a type, so that the compiler makes code for each number.
  template <class Work>
  void in_panels(PromptScratch& own, Work&& work) {
    auto column = [&](int d) {
      return own.values.get() + int64_t(d / PANEL) * KEY_PAIRS * PANEL + d % PANEL;
    };
    int d = 0;
    for (; d + PANEL <= prompts_.head_dim; d += PANEL)
      work(d, column(d), std::integral_constant<int, 4>());
    for (; d < prompts_.head_dim; d += LANES)
      work(d, column(d), std::integral_constant<int, 1>());
  }

  void scale_scores(PromptScratch& own, int num_rows, float (*scores)[KEY_TILE]) {
    for (int r = 0; r < num_rows; ++r)
      for (int k = 0; k < KEY_TILE; k += LANES) {
        const Floats scales = load(own.key_scales + k);
        store(scores[r] + k, load(scores[r] + k) * scales);
      }
  }

  // Whether tokens at all positions `from` to `to` see all keys of the tile at `key`.
  bool see_all(int from, int to, int key) const {
    return key + KEY_TILE - 1 <= from && (prompts_.window <= 0 || key > to - prompts_.window);
  }

  // Scores of keys that a row does not see become -infinity. `position` is that of row 0, counted
  // from the first key.
  void hide_scores(int begin, int num_rows, int position, float (*scores)[KEY_TILE]) const {
    for (int r = 0; r < num_rows; ++r) {
      const int end = position + (begin + r) / group() + 1;
      const int first = prompts_.window > 0 ? end - prompts_.window : 0;
      for (int k = 0; k < KEY_TILE; k += LANES) {
        const Mask seen = first_lanes(end - k) & ~first_lanes(first - k);
        const Floats lowest = broadcast(-std::numeric_limits<float>::infinity());
        store(scores[r] + k, select(lanes_of(seen), load(scores[r] + k), lowest));
      }
    }
  }

  // Weights 2^(score * scale - peak) of up to 16 rows, rounded to bfloat16. A row's peak follows its
  // largest score only when that is HEADROOM above it, so sums are rarely rescaled.
  void weigh(PromptScratch& own, int begin, int num_rows, const float (*scores)[KEY_TILE],
             Activation (*weights)[KEY_TILE]) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    const Floats scale = broadcast(LOG2_E / std::sqrt(static_cast<float>(prompts_.head_dim)));
    float* peaks = own.peaks.get() + begin;
    const Mask rows = first_lanes(num_rows);
    const Floats before = load(peaks, rows);
    const Floats largest = row_maxima(scores) * scale;
    const Floats highest = before + broadcast(HEADROOM);
    const Mask grown = rows & mask_of(less(highest, largest));
    if (grown != 0) {
      store(peaks, largest, grown);
      multiply_sums(own, begin, grown, power_of_two(before - largest));
    }
    const bool has_scales = cache_.scales_offset != 0;
    for (int r = 0; r < num_rows; ++r) {
      // A row that has seen no key yet has scores of -infinity, and weights of 0.
      const Floats less_peak = broadcast(peaks[r] == LOWEST ? 0.0f : -peaks[r]);
      float* totals = own.totals.get() + int64_t(begin + r) * LANES;
      Floats total = load(totals);
#pragma GCC unroll 4
      for (int k = 0; k < KEY_TILE; k += LANES) {
        Floats some = power_of_two(fma(load(scores[r] + k), scale, less_peak));
        total = total + some;
        if (has_scales) some = some * load(own.value_scales + k);
        store_rounded(weights[r] + k, some);
      }
      store(totals, total);
    }
  }

  // Multiplies the sums of the rows in the mask by their factors.
  void multiply_sums(PromptScratch& own, int begin, Mask rows, Floats factors) {
    alignas(64) float its_factors[LANES];
    store(its_factors, factors);
    auto multiply = [](float* at, Floats factor) {
      store(at, load(at) * factor);
    };
    for (int r = 0; r < LANES; ++r) {
      if ((rows >> r & 1) == 0) continue;
      const int64_t row = begin + r;
      const Floats factor = broadcast(its_factors[r]);
      multiply(own.totals.get() + row * LANES, factor);
      for (int d = 0; d < prompts_.head_dim; d += LANES)
        multiply(own.sums.get() + row * prompts_.head_dim + d, factor);
    }
  }

  void end_rows(PromptScratch& own, const Span& span, int kv_head) {
    const int dim = prompts_.head_dim, size = group() * dim;
    const int num_queries = span.end - span.begin;
    for (int i = 0; i < num_queries; ++i) {
      const int64_t token = span.begin + i;
      for (int g = 0; g < group(); ++g) {
        const int row = i * group() + g;
        const float total = sum_of(load(own.totals.get() + row * LANES));
        const Floats inverse = broadcast(1.0f / total);
        const float* sums = own.sums.get() + int64_t(row) * dim;
        for (int d = 0; d < dim; d += LANES)
          store(place(token, kv_head * size + g * dim + d),
                load(sums + d) * inverse);
      }
    }
  }

  bf16* place(int64_t token, int column) const {
    const int num_columns = prompts_.num_heads * prompts_.head_dim;
    if (prompts_.is_out_tiled) return TiledRows{prompts_.out, num_columns}.at(token, column);
    return prompts_.out + token * num_columns + column;
  }

  Prompts prompts_{};
  KVPages cache_{};
  PerThread<PromptScratch> own_;
  Buffer<Span> spans_;
  int num_spans_ = 0;
};

}  // namespace disagg
