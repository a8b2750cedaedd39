// One decode step of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on a CPU, in one call. It takes
// a token of each sequence, or a few to verify a draft, writes their KV to the paged cache, and returns
// the logits of each. The twin is
// `Decoder.forward` (disagg/models/decoder.py), which also describes the weights. The plain C
// interface is at the end; `disagg/kernels/cpu/step.py` calls it.

#include <algorithm>

#include "amx.h"
#include "attention.h"
#include "buffer.h"
#include "chunks.h"
#include "large_step.h"
#include "model.h"
#include "norm.h"
#include "product.h"
#include "prompt_call.h"
#include "team.h"
#include "weights.h"

namespace disagg {
namespace {

// The memory of one thread.
struct Own {
  Buffer<Activation> normed;  // [num_rows, hidden]
  Buffer<float> gates;  // [num_rows, PANEL]
  Buffer<bf16> queries;
  Buffer<float> scores;
  Buffer<bf16> widened;
  Buffer<bf16> turned;  // [head_dim]: a key
};

class Step {
 public:
  // The caller still owns `layers` and `team`.
  Step(const Model& model, const Layer* layers, Team& team)
      : model_(model), layers_(layers), team_(team) {}

  static int num_phases(const Model& model) { return 6 * model.num_layers + 1; }

  Status run(const Batch& batch, const KVPages& cache, int num_threads) {
    for (int row = 0; row < batch.num_rows; ++row)
      if (batch.token_ids[row] < 0 || batch.token_ids[row] >= model_.vocab) return UNKNOWN_TOKEN;
    team_.clear();
    num_threads = team_.reserve(num_threads);
    batch_ = batch;
    cache_ = cache;
    if (!make_room(num_threads)) return NO_MEMORY;
    for (int row = 0; row < batch.num_rows; ++row)
      embed(batch.token_ids[row], hidden_.get() + int64_t(row) * model_.hidden);
    team_.run(num_threads, *this);
    return DONE;
  }

  // The program of each thread of the team.
  void program(Member& member) {
    const Tiles tiles;
    for (int i = 0; i < model_.num_layers; ++i) compute_layer(member, i);
    compute_logits(member);
  }

 private:
  int group() const { return model_.num_heads / model_.num_kv_heads; }
  int q_size() const { return model_.num_heads * model_.head_dim; }
  int qkv_size() const { return q_size() + 2 * model_.num_kv_heads * model_.head_dim; }

  void embed(int64_t token_id, bf16* out) const {
    if (model_.embedding != nullptr)
      memcpy(out, model_.embedding + token_id * model_.hidden, sizeof(bf16) * model_.hidden);
    else
      any_row(model_.table, token_id, out);
  }

  bool make_room(int num_threads) {
    if (!own_.hold(num_threads)) return false;
    const int64_t num_rows = batch_.num_rows, dim = model_.head_dim;
    const int64_t num_read = filled_rows(batch_.num_rows);  // rows that products read
    for (int i = 0; i < num_threads; ++i) {
      Own& own = own_[i];
      if (!own.normed.hold(num_read * model_.hidden) || !own.gates.hold(num_rows * PANEL) ||
          !own.queries.hold(group() * dim) || !own.scores.hold(group() * CHUNK) ||
          !own.widened.hold(KEYS_AT_ONCE * dim) || !own.turned.hold(dim))
        return false;
    }
    const int64_t num_parts = ChunkLists::most_chunks(batch_) * model_.num_kv_heads;
    if (!hidden_.hold(num_rows * model_.hidden) || !qkv_.hold(num_rows * qkv_size()) ||
        !attended_.hold(num_read * q_size()) || !inner_.hold(num_read * model_.inner) ||
        !partials_.hold(num_parts * group() * (dim + 2)) ||
        !arrived_.hold(num_rows * model_.num_kv_heads) ||
        !chunks_.list(layers_, model_.num_layers, batch_))
      return false;
    for (int64_t i = 0; i < num_rows * model_.num_kv_heads; ++i)
      new (arrived_.get() + i) std::atomic<int>(0);
    return true;
  }

  void compute_logits(Member& member) {
    bool is_normed = false;
    const Matrix& head = model_.head;
    multiply(member, head, head, [&] { return normed(member, model_.norm, is_normed); },
             [&](int row, int column, Floats sums) {
               store_rounded(batch_.logits + int64_t(row) * head.num_out + column,
                             finished(head, column, sums), first_lanes(head.num_out - column));
             });
  }

  void compute_layer(Member& member, int index) {
    const Layer& layer = layers_[index];
    bool is_normed = false;
    multiply(member, layer.qkv, layer.output, [&] { return normed(member, layer.input_norm, is_normed); },
             [&](int row, int column, Floats sums) {
               store_finished(layer.qkv, row, column, sums, qkv_.get());
             });
    attend(member, index);
    multiply(member, layer.output, layer.gate, [&] { return attended_.get(); },
             [&](int row, int column, Floats sums) { add(layer.output, row, column, sums); });
    compute_inner(member, layer);
    const Matrix& after = index + 1 < model_.num_layers ? layers_[index + 1].qkv : model_.head;
    multiply(member, layer.down, after, [&] { return inner_.get(); },
             [&](int row, int column, Floats sums) { add(layer.down, row, column, sums); });
  }

  // Normalises all rows into this thread's own memory. Each thread does it, because that takes less
  // time than waiting for another thread.
  const Activation* normed(Member& member, const bf16* weight, bool& is_done) {
    Activation* out = own_[member.id].normed.get();
    if (!is_done) {
      for (int row = 0; row < batch_.num_rows; ++row) {
        const int64_t begin = int64_t(row) * model_.hidden;
        rms_norm(hidden_.get() + begin, weight, model_.hidden, model_.eps,
                 [&](int i) { return out + begin + i; });
      }
      is_done = true;
    }
    return out;
  }

  // A product as a phase; `following` is the weight of the next one.
  template <class Input, class Take>
  void multiply(Member& member, const Matrix& matrix, const Matrix& following, Input&& input,
                Take&& take) {
    const int num_panels = matrix.num_panels(), num_rows = batch_.num_rows;
    const int num_parts = parts_of_panel(member, num_panels);
    member.phase(num_panels * num_parts, [&](int item) {
      const Activation* x = input();
      const int panel = item / num_parts, part = item % num_parts;
      const uint32_t* next = panel_after(member, matrix, panel, following);
      if (num_parts == 1)
        any_product<4>(matrix, panel, 0, x, num_rows, next, take);
      else
        any_product<1>(matrix, panel, part, x, num_rows, next, take);
    });
  }

  // Panels are divided if there are too few for all threads.
  static int parts_of_panel(const Member& member, int num_panels) {
    return num_panels >= 2 * member.num_threads ? 1 : 4;
  }

  // The panel that this thread will probably read next, since threads take panels in turn.
  static const uint32_t* panel_after(const Member& member, const Matrix& matrix, int panel,
                                     const Matrix& following) {
    const int next = panel + member.num_threads;
    if (next < matrix.num_panels()) return matrix.panel(next);
    const int begin = next - matrix.num_panels(), last = following.num_panels() - 1;
    return following.panel(begin < last ? begin : last);
  }

  void add(const Matrix& matrix, int row, int column, Floats sums) {
    bf16* at = hidden_.get() + int64_t(row) * matrix.num_out + column;
    const Mask mask = first_lanes(matrix.num_out - column);
    store(at, load(at, mask) + finished(matrix, column, sums), mask);
  }

  // silu(gate) * up, by panels of both.
  void compute_inner(Member& member, const Layer& layer) {
    bool is_normed = false;
    const int num_panels = layer.gate.num_panels();
    const int num_parts = parts_of_panel(member, num_panels);
    member.phase(num_panels * num_parts, [&](int item) {
      const int panel = item / num_parts, part = item % num_parts;
      if (num_parts == 1)
        compute_gated<4>(member, layer, panel, 0, is_normed);
      else
        compute_gated<1>(member, layer, panel, part, is_normed);
    });
  }

  template <int num_vectors>
  void compute_gated(Member& member, const Layer& layer, int panel, int part, bool& is_normed) {
    const Activation* x = normed(member, layer.post_norm, is_normed);
    float* gates = own_[member.id].gates.get();
    auto open = [&](int row, int column, Floats sums) {
      store(gates + row * PANEL + column % PANEL, silu(finished(layer.gate, column, sums)));
    };
    any_product<num_vectors>(layer.gate, panel, part, x, batch_.num_rows, layer.up.panel(panel),
                             open);
    const uint32_t* next = panel_after(member, layer.gate, panel, layer.down);
    auto times = [&](int row, int column, Floats sums) {
      const Floats gate = load(gates + row * PANEL + column % PANEL);
      const Floats up = finished(layer.up, column, sums);
      store_rounded(inner_.get() + int64_t(row) * model_.inner + column, gate * up,
                    first_lanes(model_.inner - column));
    };
    any_product<num_vectors>(layer.up, panel, part, x, batch_.num_rows, next, times);
  }

  void attend(Member& member, int index) {
    if (batch_.has_chunks)  // each row attends to the rows before it, so these are written first
      member.phase(model_.num_kv_heads, [&](int kv_head) {
        for (int row = 0; row < batch_.num_rows; ++row)
          write_kv(own_[member.id], index, row, kv_head);
      });
    const ChunkLists::Range range = chunks_.of_layer(index);
    member.phase((range.end - range.begin) * model_.num_kv_heads, [&](int item) {
      const int place = item / model_.num_kv_heads, kv_head = item % model_.num_kv_heads;
      attend_chunk(own_[member.id], index, chunks_.chunk(range.begin + place), place, kv_head);
    });
  }

  // `place` is the index of the chunk in its layer's list.
  void attend_chunk(Own& own, int index, const Chunk& chunk, int64_t place, int kv_head) {
    const Layer& layer = layers_[index];
    const int dim = model_.head_dim, row = chunk.row;
    const bf16* qkv = qkv_.get() + int64_t(row) * qkv_size();
    const bf16* rope = model_.rope + batch_.positions[row] * 2 * dim;
    if (!batch_.has_chunks && chunk.end == batch_.context_lens[row])
      write_kv(own, index, row, kv_head);
    for (int g = 0; g < group(); ++g) {
      const int head = kv_head * group() + g;
      const bf16* norm = layer.qk_norm == nullptr ? nullptr : layer.qk_norm + head * dim;
      norm_rope(qkv + head * dim, norm, model_.eps, rope, dim, own.queries.get() + g * dim);
    }
    const AttentionScratch scratch{own.queries.get(), own.scores.get(), own.widened.get()};
    disagg::attend(cache_, index, kv_head, batch_.block_tables + row * batch_.table_stride,
                   chunk.begin, chunk.end, group(), dim, scratch,
                   partial(place * model_.num_kv_heads + kv_head));
    std::atomic<int>& arrived = arrived_.get()[row * model_.num_kv_heads + kv_head];
    if (chunk.num_chunks > 1 && arrived.fetch_add(1) + 1 < chunk.num_chunks) return;
    arrived.store(0, std::memory_order_relaxed);
    join_chunks(place - chunk.index, chunk, kv_head);
  }

  // The thread that computed the last chunk of a sequence combines them all.
  void join_chunks(int64_t first_place, const Chunk& chunk, int kv_head) {
    auto part = [&](int c) {
      return partial((first_place + c) * model_.num_kv_heads + kv_head);
    };
    join(part, chunk.num_chunks, group(), model_.head_dim,
         attended_.get() + int64_t(chunk.row) * q_size() + kv_head * group() * model_.head_dim);
  }

  Partial partial(int64_t place) const {
    const int64_t size = group() * model_.head_dim;
    float* at = partials_.get() + place * (size + 2 * group());
    return {at, at + size, at + size + group()};
  }

  void write_kv(Own& own, int index, int row, int kv_head) {
    const int dim = model_.head_dim, head = model_.num_heads + kv_head;
    const bf16* key = qkv_.get() + int64_t(row) * qkv_size() + head * dim;
    const bf16* norms = layers_[index].qk_norm;
    norm_rope(key, norms == nullptr ? nullptr : norms + head * dim, model_.eps,
              model_.rope + batch_.positions[row] * 2 * dim, dim, own.turned.get());
    cache_.begin_block(batch_.slots[row], index, kv_head);
    cache_.put(batch_.slots[row], index, kv_head, dim, own.turned.get(),
               key + model_.num_kv_heads * dim);
  }

  const Model model_;
  const Layer* const layers_;
  Batch batch_{};
  KVPages cache_{};
  PerThread<Own> own_;
  Buffer<bf16> hidden_, qkv_;
  Buffer<Activation> attended_, inner_;
  Buffer<float> partials_;
  ChunkLists chunks_;
  Buffer<std::atomic<int>> arrived_;  // chunks that are done, [num_rows, num_kv_heads]
  Team& team_;
};

// Both ways to compute a step of one model, on the same threads.
struct Steps {
  explicit Steps(const Model& model)
      : has_layers(layers.hold(model.num_layers)),
        decodes(model, layers.get(), team),
        large(model, layers.get(), team),
        team(std::max(Step::num_phases(model), LargeStep::num_phases(model))) {
    if (has_layers) memcpy(layers.get(), model.layers, sizeof(Layer) * model.num_layers);
  }

  bool is_usable() const { return has_layers && team.is_usable(); }

  Buffer<Layer> layers;
  const bool has_layers;
  Step decodes;
  LargeStep large;
  Team team;  // the last member, so that its threads end before the data that they use is freed
};

}  // namespace
}  // namespace disagg

#pragma GCC visibility push(default)
extern "C" {

// The version, which must change with the structures.
int32_t disagg_step_version() { return 10; }

// Whether this process may use the registers that the code needs. Must be called first.
int32_t disagg_step_may_run() { return disagg::may_use_tiles(); }

// Whether weights in panels of so many columns can be read; 0 columns mean another layout.
int32_t disagg_step_reads_panels(int32_t width) { return disagg::reads_panels(width); }

// Returns null if there is not enough memory. The layers are copied, but the weights are not.
void* disagg_step_new(const disagg::Model* model) {
  auto* step = new (std::nothrow) disagg::Steps(*model);
  if (step != nullptr && step->is_usable()) return step;
  delete step;
  return nullptr;
}

void disagg_step_free(void* step) { delete static_cast<disagg::Steps*>(step); }

// Returns a `Status`; nothing is computed unless it is 0. One call at a time.
int32_t disagg_step_run(void* step, const disagg::Batch* batch, const disagg::KVPages* cache,
                        int32_t num_threads) {
  return static_cast<disagg::Steps*>(step)->decodes.run(*batch, *cache, num_threads);
}

// Whether products use AMX.
int32_t disagg_step_has_tiles() { return disagg::HAS_TILES; }

// Whether products use instructions for bfloat16.
int32_t disagg_step_has_bf16() { return disagg::HAS_BF16; }

// As `disagg_step_run`, for tokens of any sequences, up to the hidden states after the last norm.
int32_t disagg_step_run_large(void* step, const disagg::Tokens* tokens,
                              const disagg::KVPages* cache, int32_t num_threads) {
  return static_cast<disagg::Steps*>(step)->large.run(*tokens, *cache, num_threads);
}

// Returns null if there is not enough memory.
void* disagg_step_prompts_new() {
  auto* attention = new (std::nothrow) disagg::PromptCall();
  if (attention != nullptr && attention->is_usable()) return attention;
  delete attention;
  return nullptr;
}

void disagg_step_prompts_free(void* attention) {
  delete static_cast<disagg::PromptCall*>(attention);
}

// Returns a `Status`, as `disagg_step_run` does. One call at a time.
int32_t disagg_step_prompts_run(void* attention, const disagg::Prompts* prompts,
                                const disagg::KVPages* cache, int32_t num_threads) {
  return static_cast<disagg::PromptCall*>(attention)->run(*prompts, *cache, num_threads);
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
