// A step with prompts of a dense decoder: all layers in one call. Weights of 8 and 4 bits are widened
// some columns at a time. The twin is `Decoder.hidden` (disagg/models/decoder.py). A token's result
// does not depend on the other sequences of a step, on threads, or on how its prompt was cut into
// chunks.
#pragma once

#include "amx.h"
#include "large_product.h"
#include "model.h"
#include "norm.h"
#include "prompt.h"
#include "team.h"
#include "widened.h"

namespace disagg {

// The tokens of a step. The tokens of a sequence are a chunk, and a decode is a chunk of one token.
struct Tokens {
  bf16* hidden;              // [num_tokens, hidden]: embeddings, to which the layers add their outputs
  const int64_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]: KV slots, block * block_size + offset
  const PromptChunk* chunks;
  const int64_t* logits_rows;  // [num_logits]: tokens that are computed after the last attention
  bf16* out;                   // [num_logits, hidden]: after the last norm
  int32_t num_tokens, num_chunks, num_logits;
};

class LargeStep {
 public:
  // The caller still owns `layers` and `team`.
  LargeStep(const Model& model, const Layer* layers, Team& team)
      : model_(model), layers_(layers), team_(team) {}

  static int num_phases(const Model& model) { return 8 * model.num_layers + 2; }

  Status run(const Tokens& tokens, const KVPages& cache, int num_threads) {
    team_.clear();
    num_threads = team_.reserve(num_threads);
    tokens_ = tokens;
    cache_ = cache;
    if (!make_room(num_threads)) return NO_MEMORY;
    team_.run(num_threads, *this);
    return DONE;
  }

  // The program of each thread of the team.
  void program(Member& member) {
    const Tiles tiles;
    for (int i = 0; i < model_.num_layers; ++i) compute_layer(member, i);
    norm_out(member);
  }

 private:
  static constexpr int ROWS_OF_WIDENED = 8 * ROWS_OF_PRODUCT;  // rows per widening of columns

  struct Own {
    Buffer<float> sums, gates;  // of BLOCK_ROWS rows and MOST_COLUMNS columns
    // For weights of fewer bits than 16; without such weights this memory is never touched.
    Buffer<uint32_t> widened, other_widened;
  };

  // Rows whose padding is set to zero once.
  class Rows {
   public:
    bool hold(int num_rows, int num_columns) {
      ProductRows rows{nullptr, num_columns};
      const int64_t size = filled(num_rows, BLOCK_ROWS) * rows.num_filled_columns();
      if (size > size_) {
        size_ = 0;
        if (!memory_.hold(size)) return false;
        memset(memory_.get(), 0, sizeof(bf16) * size);
        size_ = size;
      }
      num_columns_ = num_columns;
      return true;
    }
    ProductRows get() const { return {memory_.get(), num_columns_}; }

   private:
    Buffer<bf16> memory_;
    int64_t size_ = 0;
    int num_columns_ = 0;
  };

  static int most(int one, int other) { return one > other ? one : other; }
  int q_size() const { return model_.num_heads * model_.head_dim; }
  int qkv_size() const { return q_size() + 2 * model_.num_kv_heads * model_.head_dim; }

  bool make_room(int num_threads) {
    if (!own_.hold(num_threads)) return false;
    const int deepest = most(most(model_.hidden, q_size()), model_.inner);
    const int64_t widened_size = int64_t(filled(deepest, TILE_DEPTH)) / 2 * MOST_COLUMNS;
    for (int i = 0; i < num_threads; ++i)
      if (!own_[i].sums.hold(MOST_COLUMNS * BLOCK_ROWS) ||
          !own_[i].gates.hold(MOST_COLUMNS * BLOCK_ROWS) ||
          !own_[i].widened.hold(widened_size) || !own_[i].other_widened.hold(widened_size))
        return false;
    const int num_tokens = tokens_.num_tokens;
    if (!normed_.hold(num_tokens, model_.hidden) || !attended_.hold(num_tokens, q_size()) ||
        !inner_.hold(num_tokens, model_.inner) || !picked_.hold(tokens_.num_logits, q_size()) ||
        !qkv_.hold(int64_t(num_tokens) * qkv_size()) ||
        !picked_hidden_.hold(int64_t(tokens_.num_logits) * model_.hidden))
      return false;
    const Prompts prompts{qkv_.get(), attended_.get().base, tokens_.chunks, tokens_.num_chunks,
                          model_.num_heads, model_.num_kv_heads, model_.head_dim, 0, 0, nullptr, HAS_TILES};
    return attention_.prepare(prompts, cache_, num_threads);
  }

  void norm_out(Member& member) {
    const bf16* hidden = only_some_matter() ? picked_hidden_.get() : tokens_.hidden;
    for_rows(member, tokens_.num_logits, [&](int row) {
      const int64_t begin = int64_t(row) * model_.hidden;
      rms_norm(hidden + begin, model_.norm, model_.hidden, model_.eps,
               [&](int i) { return tokens_.out + begin + i; });
    });
  }

  bool only_some_matter() const { return tokens_.num_logits != tokens_.num_tokens; }

  void compute_layer(Member& member, int index) {
    const Layer& layer = layers_[index];
    int num_rows = tokens_.num_tokens;
    bf16* hidden = tokens_.hidden;
    ProductRows attended = attended_.get();
    for_rows(member, num_rows, [&](int row) {
      begin_blocks(index, row);
      norm_row(hidden, layer.input_norm, row);
    });
    multiply(member, layer.qkv, normed_.get(), num_rows, [&](int row, int column, Floats sums) {
      store(qkv_.get() + int64_t(row) * qkv_size() + column, finished(layer.qkv, column, sums),
            first_lanes(qkv_size() - column));
    });
    for_rows(member, num_rows, [&](int row) {
      if (row == 0) attention_.set_layer(index, layer.window);
      turn_and_write(index, row);
    });
    member.phase(attention_.num_items(), [&](int item) { attention_.attend(member.id, item); });
    if (index + 1 == model_.num_layers && only_some_matter()) {
      for_rows(member, tokens_.num_logits, [&](int row) { pick(row); });
      num_rows = tokens_.num_logits;
      hidden = picked_hidden_.get();
      attended = picked_.get();
    }
    auto add_to_hidden = [&](const Matrix& matrix) {
      return [&, hidden](int row, int column, Floats sums) {
        bf16* at = hidden + int64_t(row) * model_.hidden + column;
        const Mask mask = first_lanes(model_.hidden - column);
        store(at, load(at, mask) + finished(matrix, column, sums), mask);
      };
    };
    multiply(member, layer.output, attended, num_rows, add_to_hidden(layer.output));
    for_rows(member, num_rows, [&](int row) { norm_row(hidden, layer.post_norm, row); });
    compute_inner(member, layer, num_rows);
    multiply(member, layer.down, inner_.get(), num_rows, add_to_hidden(layer.down));
  }

  // Phases that process rows one by one.
  template <class Work>
  static void for_rows(Member& member, int num_rows, Work&& work) {
    member.phase((num_rows + TILE_ROWS - 1) / TILE_ROWS, [&](int item) {
      const int begin = item * TILE_ROWS;
      for (int row = begin; row < begin + TILE_ROWS && row < num_rows; ++row) work(row);
    });
  }

  // The number of columns of an item, such that there are enough items for all threads.
  static int columns_of_item(const Member& member, const Matrix& matrix, int num_row_items) {
    int num_columns = MOST_COLUMNS;
    while (num_columns > PANEL &&
           (matrix.num_out + num_columns - 1) / num_columns * num_row_items < 4 * member.num_threads)
      num_columns /= 2;
    return num_columns;
  }

  // A phase whose items are some rows and some columns of a product. Items with the same columns
  // follow each other, because they read the same part of the weight. `begin(first, end)` is called
  // for an item's columns. The function that it returns is called for each BLOCK_ROWS rows, with the
  // first row and the number of rows.
  template <class Begin>
  static void for_blocks(Member& member, const Matrix& matrix, int num_rows, Begin&& begin_item) {
    const int rows_of_item = matrix.panels == nullptr ? ROWS_OF_WIDENED : ROWS_OF_PRODUCT;
    const int num_row_items = (num_rows + rows_of_item - 1) / rows_of_item;
    const int num_columns = columns_of_item(member, matrix, num_row_items);
    const int num_column_items = (matrix.num_out + num_columns - 1) / num_columns;
    member.phase(num_row_items * num_column_items, [&](int item) {
      const int first = item / num_row_items * num_columns;
      const int end = first + num_columns < matrix.num_out ? first + num_columns : matrix.num_out;
      const int begin = item % num_row_items * rows_of_item;
      auto work = begin_item(first, end);
      for (int row = begin; row < begin + rows_of_item && row < num_rows; row += BLOCK_ROWS)
        work(row, num_rows - row < BLOCK_ROWS ? num_rows - row : BLOCK_ROWS);
    });
  }

  static SomeColumns some_columns(const Matrix& matrix, int first, int end, uint32_t* scratch) {
    if (matrix.panels != nullptr) return {matrix, first, end, nullptr};
    widen_panels(matrix, first, end, scratch);
    return {matrix, first, end, scratch};
  }

  template <class Take>
  void multiply(Member& member, const Matrix& matrix, const ProductRows& x, int num_rows, Take&& take) {
    Own& own = own_[member.id];
    for_blocks(member, matrix, num_rows, [&](int first, int end) {
      const SomeColumns columns = some_columns(matrix, first, end, own.widened.get());
      return [&, columns](int row, int count) {
        multiply_rows(columns, x, row, count, own.sums.get(),
                      [&](int r, int column, Floats some) { take(row + r, column, some); });
      };
    });
  }

  // silu(gate) * up.
  void compute_inner(Member& member, const Layer& layer, int num_rows) {
    Own& own = own_[member.id];
    const ProductRows x = normed_.get(), inner = inner_.get();
    for_blocks(member, layer.gate, num_rows, [&](int first, int end) {
      const SomeColumns gates = some_columns(layer.gate, first, end, own.widened.get());
      const SomeColumns ups = some_columns(layer.up, first, end, own.other_widened.get());
      auto gate_at = [&own, first](int r, int column) {
        return own.gates.get() + int64_t(column - first) * BLOCK_ROWS + r * LANES;
      };
      return [&, gates, ups, gate_at](int row, int count) {
        multiply_rows(gates, x, row, count, own.sums.get(), [&](int r, int column, Floats some) {
          store(gate_at(r, column), silu(finished(layer.gate, column, some)));
        });
        multiply_rows(ups, x, row, count, own.sums.get(), [&](int r, int column, Floats some) {
          const Floats gate = load(gate_at(r, column));
          store(inner.at(row + r, column), gate * finished(layer.up, column, some),
                first_lanes(model_.inner - column));
        });
      };
    });
  }

  void norm_row(const bf16* hidden, const bf16* weight, int row) {
    const ProductRows out = normed_.get();
    rms_norm(hidden + int64_t(row) * model_.hidden, weight, model_.hidden, model_.eps,
             [&](int i) { return out.at(row, i); });
  }

  void begin_blocks(int index, int row) {
    for (int kv_head = 0; kv_head < model_.num_kv_heads; ++kv_head)
      cache_.begin_block(tokens_.slots[row], index, kv_head);
  }

  // Rotates the heads of queries and keys (RoPE), and stores keys and values in their slots.
  void turn_and_write(int index, int row) {
    const int dim = model_.head_dim, num_kv_heads = model_.num_kv_heads;
    const int num_turned = model_.num_heads + num_kv_heads;
    bf16* heads = qkv_.get() + int64_t(row) * qkv_size();
    const bf16* norms = layers_[index].qk_norm;
    const bf16* rope = model_.rope + tokens_.positions[row] * 2 * dim;
    for (int head = 0; head < num_turned; ++head) {
      bf16* at = heads + head * dim;
      norm_rope(at, norms == nullptr ? nullptr : norms + head * dim, model_.eps, rope, dim, at);
    }
    for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      const bf16* key = heads + (model_.num_heads + kv_head) * dim;
      cache_.put(tokens_.slots[row], index, kv_head, dim, key, key + num_kv_heads * dim);
    }
  }

  // A token whose logits are needed.
  void pick(int row) {
    const int64_t token = tokens_.logits_rows[row];
    memcpy(picked_hidden_.get() + int64_t(row) * model_.hidden,
           tokens_.hidden + token * model_.hidden, sizeof(bf16) * model_.hidden);
    const ProductRows from = attended_.get(), to = picked_.get();
    for (int i = 0; i < q_size(); i += LANES)
      memcpy(to.at(row, i), from.at(token, i), sizeof(bf16) * LANES);
  }

  const Model model_;
  const Layer* const layers_;
  Tokens tokens_{};
  KVPages cache_{};
  PerThread<Own> own_;
  Rows normed_, attended_, inner_, picked_;
  Buffer<bf16> qkv_, picked_hidden_;
  PromptAttention attention_;
  Team& team_;
};

}  // namespace disagg
