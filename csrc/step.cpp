// A step of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on a CPU, in one call: the next tokens of
// some sequences, a decode, the tokens of a draft, or a chunk of a prompt. It writes their KV to the
// paged cache. The twin is `Decoder.forward` (disagg/models/decoder.py), which also describes the
// weights. A token's result does not depend on the other sequences of a step, on threads, or on how
// its prompt was cut into chunks. The plain C interface is at the end; `disagg/kernels/cpu/step.py`
// and `attention.py` call it.

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "attention.h"
#include "buffer.h"
#include "large_product.h"
#include "model.h"
#include "norm.h"
#include "product.h"
#include "team.h"
#include "weights.h"
#include "widened.h"

namespace disagg {
namespace {

constexpr int ROWS_OF_WIDENED = 8 * ROWS_OF_PRODUCT;  // rows for which columns are widened once

class Step {
 public:
  explicit Step(const Model& model)
      : model_(model),
        has_layers_(layers_.hold(model.num_layers)),
        team_(11 * model.num_layers + 6) {
    if (has_layers_) memcpy(layers_.get(), model.layers, sizeof(Layer) * model.num_layers);
  }

  bool is_usable() const { return has_layers_ && team_.is_usable(); }

  void keep(const Kept& kept) { kept_ = kept; }

  Status run(const Batch& batch, const KVPages& cache, int num_threads) {
    for (int token = 0; token < batch.num_tokens; ++token)
      if (batch.token_ids[token] < 0 || batch.token_ids[token] >= model_.vocab) return UNKNOWN_TOKEN;
    team_.clear();
    num_threads = team_.reserve(num_threads);
    batch_ = batch;
    if (!make_room(cache, num_threads)) return NO_MEMORY;
    team_.run(num_threads, *this);
    return DONE;
  }

  // The program of each thread of the team.
  void program(Member& member) {
    const Tiles tiles;
    for_rows(member, batch_.num_tokens, [&](int row) {
      embed(batch_.token_ids[row], hidden_.get() + int64_t(row) * model_.hidden);
      if (model_.state_norm != nullptr) join(row);
    });
    for (int i = 0; i < model_.num_layers; ++i) {
      keep_states(member, i);
      compute_layer(member, i);
    }
    compute_logits(member);
  }

 private:
  // Memory of rows of one width.
  class RowsBuffer {
   public:
    // is_tiled: whether AMX multiplies them as tiles.
    bool hold(int num_rows, int num_columns, bool is_tiled) {
      rows_ = {nullptr, num_columns, is_tiled};
      const int64_t size = filled(num_rows, BLOCK_ROWS) * rows_.num_filled_columns();
      if (!memory_.hold(size)) return false;
      rows_.base = memory_.get();
      if (rows_.num_filled_columns() > num_columns) memset(rows_.base, 0, sizeof(bf16) * size);
      return true;
    }
    const Rows& get() const { return rows_; }

   private:
    Buffer<bf16> memory_;
    Rows rows_{};
  };

  // The memory of one thread.
  struct Own {
    Buffer<Activation> copied;  // what products of few rows read
    Buffer<float> sums, gates;  // of the part of a product
    // For weights of fewer bits than 16; without such weights this memory is never touched.
    Buffer<uint32_t> widened, other_widened;
  };

  // The rows that a product reads: all tokens, or the picked ones, whose logits are needed.
  struct Input {
    Rows rows;
    const bf16* hidden;  // if there is a norm, `rows` become these after it
    const bf16* norm;
    bool is_picked;
  };

  // The part of a product that a thread computes at a time.
  struct Part {
    int first_row, num_rows, first_column;

    // The place of 16 numbers in a thread's memory of such a part.
    int64_t place(int row, int column) const {
      return int64_t(column - first_column) * num_rows + (row - first_row) * LANES;
    }
  };

  int q_size() const { return model_.num_heads * model_.head_dim; }
  int qkv_size() const { return q_size() + 2 * model_.num_kv_heads * model_.head_dim; }
  bool only_some_matter() const { return batch_.num_logits != batch_.num_tokens; }
  int num_rows_of(bool is_picked) const { return is_picked ? batch_.num_logits : batch_.num_tokens; }

  // Products of few rows read weights of 8 or 4 bits as they are, and do not wait until rows are laid
  // out. With weights of 16 bits both give the same result, bit by bit.
  bool has_few(const Matrix& matrix, bool is_picked) const {
    const bool is_exact = matrix.panels != nullptr || &matrix == &model_.head;
    return batch_.is_each_alone || (is_picked && batch_.num_logits <= FEW_ROWS && is_exact);
  }
  bool has_tiles(const Matrix& matrix, bool is_picked) const {
    return HAS_TILES && !has_few(matrix, is_picked);
  }

  bool make_room(const KVPages& cache, int num_threads) {
    if (!own_.hold(num_threads)) return false;
    const int num_tokens = batch_.num_tokens, num_logits = batch_.num_logits;
    const Layer& first = layers_.get()[0];
    const int deepest = std::max({first.qkv.num_in, model_.hidden, q_size(), model_.inner});
    const int num_few = batch_.is_each_alone ? num_tokens : FEW_ROWS;
    const int64_t widened_size = int64_t(filled(deepest, TILE_DEPTH)) / 2 * MOST_COLUMNS;
    for (int i = 0; i < num_threads; ++i) {
      Own& own = own_[i];
      if (!own.copied.hold(int64_t(filled_rows(num_few)) * deepest) ||
          !own.sums.hold(MOST_COLUMNS * BLOCK_ROWS) ||
          !own.gates.hold(std::max(MOST_COLUMNS * BLOCK_ROWS, PANEL * num_few)) ||
          !own.widened.hold(widened_size) || !own.other_widened.hold(widened_size))
        return false;
    }
    const Layer& last = layers_.get()[model_.num_layers - 1];
    const bool is_tiled = HAS_TILES && !batch_.is_each_alone;
    if (model_.state_norm != nullptr && !joined_.hold(num_tokens, first.qkv.num_in, is_tiled))
      return false;
    if (!normed_.hold(num_tokens, model_.hidden, is_tiled) ||
        !attended_.hold(num_tokens, q_size(), is_tiled) ||
        !inner_.hold(num_tokens, model_.inner, is_tiled) ||
        !picked_.hold(num_logits, q_size(), has_tiles(last.output, true)) ||
        !hidden_.hold(int64_t(num_tokens) * model_.hidden) ||
        !picked_hidden_.hold(int64_t(num_logits) * model_.hidden) ||
        !qkv_.hold(int64_t(num_tokens) * qkv_size()))
      return false;
    Attended attended{};
    attended.qkv = qkv_.get();
    attended.out = attended_.get();
    attended.sequences = batch_.sequences;
    attended.num_tokens = num_tokens;
    attended.num_sequences = batch_.num_sequences;
    attended.num_heads = model_.num_heads;
    attended.num_kv_heads = model_.num_kv_heads;
    attended.num_vectors = 2;
    attended.head_dim = model_.head_dim;
    attended.scale = 1.0f / std::sqrt(static_cast<float>(model_.head_dim));
    return attention_.prepare(attended, cache, num_threads);
  }

  void embed(int64_t token_id, bf16* out) const {
    if (model_.embedding != nullptr)
      memcpy(out, model_.embedding + token_id * model_.hidden, sizeof(bf16) * model_.hidden);
    else
      any_row(model_.table, token_id, out);
  }

  // What the attention of a head's layer reads: the embedding of a token and a state, side by side.
  // The layer adds to the state.
  void join(int row) {
    const int64_t begin = int64_t(row) * model_.hidden;
    bf16* hidden = hidden_.get() + begin;
    const Rows& joined = joined_.get();
    rms_norm(hidden, layers_.get()[0].input_norm, model_.hidden, model_.eps,
             [&](int i) { return joined.at(row, i); });
    memcpy(hidden, batch_.states + begin, sizeof(bf16) * model_.hidden);
    rms_norm(hidden, model_.state_norm, model_.hidden, model_.eps,
             [&](int i) { return joined.at(row, model_.hidden + i); });
  }

  // Copies the states before a layer, side by side with those before the other kept layers.
  void keep_states(Member& member, int index) {
    const int32_t* const end = kept_.layers + kept_.num_layers;
    if (std::find(kept_.layers, end, index) == end) return;
    for_rows(member, batch_.num_tokens, [&](int row) {
      for (int i = 0; i < kept_.num_layers; ++i)
        if (kept_.layers[i] == index)
          memcpy(kept_.out + (int64_t(row) * kept_.num_layers + i) * model_.hidden,
                 hidden_.get() + int64_t(row) * model_.hidden, sizeof(bf16) * model_.hidden);
    });
  }

  void compute_layer(Member& member, int index) {
    const Layer& layer = layers_.get()[index];
    const bool is_last = index + 1 == model_.num_layers;
    bf16* hidden = hidden_.get();
    Input input{normed_.get(), hidden, layer.input_norm, false};
    if (index == 0 && model_.state_norm != nullptr) input = {joined_.get(), nullptr, nullptr, false};
    multiply(member, layer.qkv, layer.output, input,
             [&](int row, int column, Floats sums) {
               store_finished(layer.qkv, row, column, sums, qkv_.get());
             });
    for_rows(member, batch_.num_tokens, [&](int row) { turn_and_write(index, row); });
    member.phase(attention_.num_items(), [&](int item) { attention_.attend(member.id, item); });
    bool is_picked = false;
    Rows attended = attended_.get(), inner = inner_.get();
    if (is_last && only_some_matter()) {
      for_rows(member, batch_.num_logits, [&](int row) { pick(row); });
      is_picked = true;
      hidden = picked_hidden_.get();
      attended = picked_.get();
      inner.is_tiled = has_tiles(layer.down, true);
    }
    auto add_to_hidden = [&](const Matrix& matrix) {
      return [&matrix, hidden](int row, int column, Floats sums) {
        bf16* at = hidden + int64_t(row) * matrix.num_out + column;
        const Mask mask = first_lanes(matrix.num_out - column);
        store(at, load(at, mask) + finished(matrix, column, sums), mask);
      };
    };
    multiply(member, layer.output, layer.gate, {attended, nullptr, nullptr, is_picked},
             add_to_hidden(layer.output));
    compute_inner(member, layer, {normed_.get(), hidden, layer.post_norm, is_picked}, inner);
    const Matrix& following = is_last ? model_.head : layers_.get()[index + 1].qkv;
    multiply(member, layer.down, following, {inner, nullptr, nullptr, is_picked},
             add_to_hidden(layer.down));
  }

  // silu(gate) * up.
  void compute_inner(Member& member, const Layer& layer, const Input& input, const Rows& inner) {
    float* gates = own_[member.id].gates.get();
    const Matrix* const both[] = {&layer.gate, &layer.up};
    for_parts(member, both, layer.down, input, [&](const Part& part, auto&& multiplied) {
      multiplied(0, [&](int row, int column, Floats sums) {
        store(gates + part.place(row, column), silu(finished(layer.gate, column, sums)));
      });
      multiplied(1, [&](int row, int column, Floats sums) {
        const Floats gate = load(gates + part.place(row, column));
        store(inner.at(row, column), gate * finished(layer.up, column, sums),
              first_lanes(model_.inner - column));
      });
    });
  }

  // The states of picked tokens after the last norm, and their logits.
  void compute_logits(Member& member) {
    const Matrix& head = model_.head;
    const bf16* hidden = only_some_matter() ? picked_hidden_.get() : hidden_.get();
    if (batch_.made != nullptr)
      for_rows(member, batch_.num_logits, [&](int row) {
        const int64_t begin = int64_t(row) * model_.hidden;
        memcpy(batch_.made + begin, hidden + begin, sizeof(bf16) * model_.hidden);
      });
    if (batch_.hidden != nullptr)
      for_rows(member, batch_.num_logits, [&](int row) {
        const int64_t begin = int64_t(row) * model_.hidden;
        rms_norm(hidden + begin, model_.norm, model_.hidden, model_.eps,
                 [&](int i) { return batch_.hidden + begin + i; });
      });
    if (batch_.logits != nullptr)
      multiply(member, head, head, {normed_.get(), hidden, model_.norm, true},
               [&](int row, int column, Floats sums) {
                 store_rounded(batch_.logits + int64_t(row) * head.num_out + column,
                               finished(head, column, sums), first_lanes(head.num_out - column));
               });
  }

  // Phases that process rows one by one.
  template <class Work>
  void for_rows(Member& member, int num_rows, Work&& work) {
    const int at_once = batch_.is_each_alone ? 1 : TILE_ROWS;
    member.phase((num_rows + at_once - 1) / at_once, [&](int item) {
      for (int row = item * at_once; row < (item + 1) * at_once && row < num_rows; ++row) work(row);
    });
  }

  // A product; `following` is the weight of the next one. `take(row, column, sums)` gets 16 columns.
  template <class Take>
  void multiply(Member& member, const Matrix& matrix, const Matrix& following, const Input& input,
                Take&& take) {
    const Matrix* const one[] = {&matrix};
    for_parts(member, one, following, input,
              [&](const Part&, auto&& multiplied) { multiplied(0, take); });
  }

  // A phase with products of the same rows with weights of one shape, part by part. Calls
  // `work(part, multiplied)`, and `multiplied(i, take)` computes this part of the `i`th product.
  template <int count, class Work>
  void for_parts(Member& member, const Matrix* const (&matrices)[count], const Matrix& following,
                 const Input& input, Work&& work) {
    if (has_few(*matrices[0], input.is_picked))
      for_panels(member, matrices, following, input, work);
    else
      for_blocks(member, matrices, input, work);
  }

  // Of few rows: parts are panels, or quarters of panels if there are too few for all threads.
  template <int count, class Work>
  void for_panels(Member& member, const Matrix* const (&matrices)[count], const Matrix& following,
                  const Input& input, Work&& work) {
    const int num_panels = matrices[0]->num_panels(), num_rows = num_rows_of(input.is_picked);
    const int num_parts = num_panels >= 2 * member.num_threads ? 1 : PANEL / LANES;
    const Activation* x = nullptr;
    member.phase(num_panels * num_parts, [&](int item) {
      if (x == nullptr) x = own_rows(member, input);
      const int panel = item / num_parts, part = item % num_parts;
      work(Part{0, num_rows, panel * PANEL}, [&](int i, auto&& take) {
        const uint32_t* next = i + 1 < count ? matrices[i + 1]->panel(panel)
                                             : panel_after(member, *matrices[0], panel, following);
        if (num_parts == 1)
          any_product<PANEL / LANES>(*matrices[i], panel, 0, x, num_rows, next, take);
        else
          any_product<1>(*matrices[i], panel, part, x, num_rows, next, take);
      });
    });
  }

  // The panel that this thread will probably read next, since threads take panels in turn.
  static const uint32_t* panel_after(const Member& member, const Matrix& matrix, int panel,
                                     const Matrix& following) {
    const int next = panel + member.num_threads;
    if (next < matrix.num_panels()) return matrix.panel(next);
    return following.panel(std::min(next - matrix.num_panels(), following.num_panels() - 1));
  }

  // The few rows of an input as products read them. Each thread normalises and widens all of them,
  // because that takes less time than waiting for another thread.
  const Activation* own_rows(Member& member, const Input& input) {
    const int num_rows = num_rows_of(input.is_picked), size = input.rows.num_columns;
    Activation* out = own_[member.id].copied.get();
    for (int row = 0; row < num_rows; ++row) {
      const int64_t begin = int64_t(row) * size;
      if (input.norm != nullptr)
        rms_norm(input.hidden + begin, input.norm, size, model_.eps,
                 [&](int i) { return out + begin + i; });
      else if (HAS_BF16 && size % 2 == 0)
        return reinterpret_cast<const Activation*>(input.rows.base);
      else
        copy_row(input.rows.at(row, 0), size, out + begin);
    }
    return out;
  }

  // Of many rows: parts are BLOCK_ROWS rows of an item, and some columns. Items with the same columns
  // follow each other, because they read the same part of the weight.
  template <int count, class Work>
  void for_blocks(Member& member, const Matrix* const (&matrices)[count], const Input& input,
                  Work&& work) {
    const Matrix& first_matrix = *matrices[0];
    const int num_rows = num_rows_of(input.is_picked);
    if (input.norm != nullptr)
      for_rows(member, num_rows, [&](int row) {
        rms_norm(input.hidden + int64_t(row) * model_.hidden, input.norm, model_.hidden, model_.eps,
                 [&](int i) { return input.rows.at(row, i); });
      });
    const int rows_of_item = first_matrix.panels == nullptr ? ROWS_OF_WIDENED : ROWS_OF_PRODUCT;
    const int num_row_items = (num_rows + rows_of_item - 1) / rows_of_item;
    const int num_columns = columns_of_item(member, first_matrix, num_row_items);
    const int num_column_items = (first_matrix.num_out + num_columns - 1) / num_columns;
    Own& own = own_[member.id];
    member.phase(num_row_items * num_column_items, [&](int item) {
      const int first = item / num_row_items * num_columns;
      const int end = std::min(first + num_columns, first_matrix.num_out);
      const int begin = item % num_row_items * rows_of_item;
      uint32_t* const scratch[] = {own.widened.get(), own.other_widened.get()};
      for (int i = 0; i < count; ++i)
        if (matrices[i]->panels == nullptr) widen_panels(*matrices[i], first, end, scratch[i]);
      for (int row = begin; row < begin + rows_of_item && row < num_rows; row += BLOCK_ROWS) {
        const Part part{row, std::min(num_rows - row, BLOCK_ROWS), first};
        work(part, [&](int i, auto&& take) {
          const SomeColumns columns{*matrices[i], first, end,
                                    matrices[i]->panels == nullptr ? scratch[i] : nullptr};
          multiply_rows(columns, input.rows, row, part.num_rows, own.sums.get(),
                        [&](int r, int column, Floats sums) { take(row + r, column, sums); });
        });
      }
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

  // Rotates the heads of queries and keys (RoPE), and stores keys and values in their slots.
  void turn_and_write(int index, int row) {
    const Layer& layer = layers_.get()[index];
    if (row == 0) attention_.set_layer(batch_.places[index], layer.window);
    const int dim = model_.head_dim;
    bf16* heads = qkv_.get() + int64_t(row) * qkv_size();
    const bf16* rope = model_.rope + int64_t(attention_.position(row)) * 2 * dim;
    for (int head = 0; head < model_.num_heads + model_.num_kv_heads; ++head) {
      bf16* at = heads + head * dim;
      norm_rope(at, layer.qk_norm == nullptr ? nullptr : layer.qk_norm + head * dim, model_.eps, rope,
                dim, at);
    }
    attention_.write(batch_.places[index], row);
  }

  // A token whose logits are needed.
  void pick(int row) {
    const int64_t token = batch_.logits_rows[row];
    memcpy(picked_hidden_.get() + int64_t(row) * model_.hidden,
           hidden_.get() + token * model_.hidden, sizeof(bf16) * model_.hidden);
    for (int i = 0; i < q_size(); i += LANES)
      memcpy(picked_.get().at(row, i), attended_.get().at(token, i), sizeof(bf16) * LANES);
  }

  const Model model_;
  Buffer<Layer> layers_;
  const bool has_layers_;
  Kept kept_{};
  Batch batch_{};
  PerThread<Own> own_;
  RowsBuffer joined_, normed_, attended_, inner_, picked_;
  Buffer<bf16> hidden_, picked_hidden_, qkv_;
  Attention attention_;
  Team team_;  // the last member, so that its threads end before the data that they use is freed
};

// Only the attention, for a model whose other operations torch computes.
class AttentionCall {
 public:
  bool is_usable() const { return team_.is_usable(); }

  Status run(const Attended& given, const KVPages& cache, int num_threads) {
    team_.clear();
    num_threads = team_.reserve(num_threads);
    given_ = given;
    if (!attention_.prepare(given, cache, num_threads)) return NO_MEMORY;
    team_.run(num_threads, *this);
    return DONE;
  }

  // The program of each thread of the team.
  void program(Member& member) {
    const Tiles tiles;
    member.phase(given_.num_tokens, [&](int token) { attention_.write(given_.place, token); });
    member.phase(attention_.num_items(), [&](int item) { attention_.attend(member.id, item); });
  }

 private:
  Attention attention_;
  Attended given_{};
  Team team_{2};  // the last member, so that its threads end before the data that they use is freed
};

template <class Kept, class... Given>
Kept* made(const Given&... given) {
  auto* kept = new (std::nothrow) Kept(given...);
  if (kept != nullptr && kept->is_usable()) return kept;
  delete kept;
  return nullptr;
}

}  // namespace
}  // namespace disagg

#pragma GCC visibility push(default)
extern "C" {

// The version, which must change with the structures and functions.
int32_t disagg_step_version() { return 14; }

// Whether this process may use the registers that the code needs. Must be called first.
int32_t disagg_step_may_run() { return disagg::may_use_tiles(); }

// Whether weights in panels of so many columns can be read; 0 columns mean another layout.
int32_t disagg_step_reads_panels(int32_t width) { return disagg::reads_panels(width); }

// Whether products use AMX.
int32_t disagg_step_has_tiles() { return disagg::HAS_TILES; }

// Whether products use instructions for bfloat16.
int32_t disagg_step_has_bf16() { return disagg::HAS_BF16; }

// Returns null if there is not enough memory. The layers are copied, but the weights are not.
void* disagg_step_new(const disagg::Model* model) { return disagg::made<disagg::Step>(*model); }

void disagg_step_free(void* step) { delete static_cast<disagg::Step*>(step); }

// Returns a `Status`; nothing is computed unless it is 0. One call at a time.
int32_t disagg_step_run(void* step, const disagg::Batch* batch, const disagg::KVPages* cache,
                        int32_t num_threads) {
  return static_cast<disagg::Step*>(step)->run(*batch, *cache, num_threads);
}

// Says for the next steps before which layers the states of all tokens are copied to `out`,
// [num_tokens, num_layers, hidden]. The caller owns both.
void disagg_step_keep(void* step, const int32_t* layers, int32_t num_layers, disagg::bf16* out) {
  static_cast<disagg::Step*>(step)->keep({layers, num_layers, out});
}

// As the three functions above, for attention alone.
void* disagg_step_attention_new() { return disagg::made<disagg::AttentionCall>(); }

void disagg_step_attention_free(void* attention) {
  delete static_cast<disagg::AttentionCall*>(attention);
}

int32_t disagg_step_attention_run(void* attention, const disagg::Attended* given,
                                  const disagg::KVPages* cache, int32_t num_threads) {
  return static_cast<disagg::AttentionCall*>(attention)->run(*given, *cache, num_threads);
}

// Some panels of x W^T + b with a weight of 8 or 4 bits, or without AMX of 16: x [num_rows, num_in],
// out [num_rows, num_out]. Returns a `Status`.
int32_t disagg_step_narrow_rows(const disagg::Matrix* matrix, const disagg::bf16* x,
                                int32_t num_rows, int32_t first_panel, int32_t end_panel,
                                disagg::bf16* out) {
  return disagg::narrow_rows(*matrix, x, num_rows, first_panel, end_panel, out);
}
}
#pragma GCC visibility pop
