// One decode step of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on a CPU, in one call: one
// token of each sequence in, its KV written to the paged cache, logits out. The twin of
// `Decoder.forward` (disagg/models/decoder.py), which also says what the weights mean. The plain C
// interface is at the end; `disagg/kernels/cpu_step.py` calls it.

#include "attention.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

namespace disagg {

// The structures of the interface. All pointers stay the caller's.

struct Layer {
  const bf16* input_norm;  // [hidden]
  const bf16* qk_norm;     // [num_heads + num_kv_heads, head_dim]; null: none
  const bf16* post_norm;   // [hidden]
  Matrix qkv, output, gate, up, down;
  int32_t window;  // positions that a token sees, itself included; 0: all
};

struct Model {
  int32_t num_layers, num_heads, num_kv_heads, head_dim, hidden, inner, vocab;
  float eps;
  const bf16* embedding;  // [vocab, hidden]
  const bf16* rope;       // [num_positions, 2, head_dim]: cosines, and sines with signs
  const bf16* norm;       // [hidden]
  Matrix head;
  const Layer* layers;
};

struct Batch {
  const int64_t* token_ids;      // [num_rows]
  const int64_t* positions;      // [num_rows]
  const int64_t* slots;          // [num_rows]: block * block_size + offset, where KV goes
  const int32_t* context_lens;   // [num_rows]: positions with KV once this step is done
  const int32_t* block_tables;   // [num_rows, table_stride]
  int64_t table_stride;
  int32_t num_rows;
  float* logits;  // [num_rows, vocab]
};

enum Status : int32_t { DONE = 0, NO_MEMORY = 1, UNKNOWN_TOKEN = 2 };

namespace {

// Memory that grows; what was in it is lost then.
template <class T>
class Buffer {
 public:
  ~Buffer() { free(memory_); }
  bool hold(int64_t size) {
    if (size <= size_) return true;
    free(memory_);
    const int64_t nbytes = (size * int64_t(sizeof(T)) + 63) / 64 * 64;
    memory_ = static_cast<T*>(aligned_alloc(64, nbytes));
    size_ = memory_ == nullptr ? 0 : size;
    return memory_ != nullptr;
  }
  T* get() const { return memory_; }

 private:
  T* memory_ = nullptr;
  int64_t size_ = 0;
};

// What the threads do not share.
struct Own {
  Buffer<bf16> normed;  // [num_rows, hidden]
  Buffer<float> gates;  // [num_rows, PANEL]
  Buffer<bf16> queries;
  Buffer<float> scores;
  Buffer<bf16> widened;
  Buffer<bf16> turned;  // [head_dim]: a key
};

// Part of one sequence's context, of each KV head.
struct Chunk {
  int32_t row, begin, end;
  int32_t index, num_chunks;  // of its sequence
};

void rms_norm(const bf16* x, const bf16* weight, int size, float eps, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += LANES) {
    const __m512 some = load(x + i, first_lanes(size - i));
    squares = _mm512_fmadd_ps(some, some, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
  const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < size; i += LANES) {
    const __mmask16 mask = first_lanes(size - i);
    const __m512 some = _mm512_mul_ps(load(x + i, mask), inverse);
    store(out + i, _mm512_mul_ps(some, load(weight + i, mask)), mask);
  }
}

// A head normalised, if `norm` is given, and turned to its position by `rope`, [2, head_dim].
void norm_rope(const bf16* head, const bf16* norm, float eps, const bf16* rope, int head_dim,
               bf16* out) {
  float inverse = 1.0f;
  if (norm != nullptr) {
    __m512 squares = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += LANES) {
      const __m512 some = load(head + d);
      squares = _mm512_fmadd_ps(some, some, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(head_dim);
    inverse = 1.0f / std::sqrt(mean + eps);
  }
  const int half = head_dim / 2;
  for (int d = 0; d < half; d += LANES) {
    const __mmask16 mask = first_lanes(half - d);
    __m512 left = load(head + d, mask), right = load(head + half + d, mask);
    if (norm != nullptr) {
      const __m512 factor = _mm512_set1_ps(inverse);
      left = _mm512_mul_ps(_mm512_mul_ps(left, factor), load(norm + d, mask));
      right = _mm512_mul_ps(_mm512_mul_ps(right, factor), load(norm + half + d, mask));
    }
    const bf16 *cos = rope, *sin = rope + head_dim;
    const __m512 new_left = _mm512_fmadd_ps(left, load(cos + d, mask),
                                            _mm512_mul_ps(right, load(sin + d, mask)));
    const __m512 new_right = _mm512_fmadd_ps(right, load(cos + half + d, mask),
                                             _mm512_mul_ps(left, load(sin + half + d, mask)));
    store(out + d, new_left, mask);
    store(out + half + d, new_right, mask);
  }
}

class Step {
 public:
  explicit Step(const Model& model)
      : model_(model),
        layers_(new (std::nothrow) Layer[model.num_layers]),
        team_(5 * model.num_layers + 1, &Step::program, this) {
    if (layers_ != nullptr)
      memcpy(layers_, model.layers, sizeof(Layer) * model.num_layers);
  }

  ~Step() {
    if (is_usable()) team_.clear();  // a thread that woke up late may still be in the last step
    delete[] own_;
    delete[] layers_;
  }

  bool is_usable() const { return layers_ != nullptr && team_.is_usable(); }

  Status run(const Batch& batch, const KVPages& cache, int num_threads) {
    for (int row = 0; row < batch.num_rows; ++row)
      if (batch.token_ids[row] < 0 || batch.token_ids[row] >= model_.vocab) return UNKNOWN_TOKEN;
    team_.clear();
    num_threads = team_.reserve(num_threads);
    batch_ = batch;
    cache_ = cache;
    if (!make_room(num_threads)) return NO_MEMORY;
    for (int row = 0; row < batch.num_rows; ++row)
      memcpy(hidden_.get() + int64_t(row) * model_.hidden,
             model_.embedding + batch.token_ids[row] * model_.hidden,
             sizeof(bf16) * model_.hidden);
    team_.run(num_threads);
    return DONE;
  }

 private:
  int group() const { return model_.num_heads / model_.num_kv_heads; }
  int q_size() const { return model_.num_heads * model_.head_dim; }
  int qkv_size() const { return q_size() + 2 * model_.num_kv_heads * model_.head_dim; }

  bool make_room(int num_threads) {
    if (num_threads > num_own_) {
      Own* grown = new (std::nothrow) Own[num_threads];
      if (grown == nullptr) return false;
      delete[] own_;
      own_ = grown;
      num_own_ = num_threads;
    }
    const int64_t num_rows = batch_.num_rows, dim = model_.head_dim;
    for (int i = 0; i < num_threads; ++i) {
      Own& own = own_[i];
      if (!own.normed.hold(num_rows * model_.hidden) || !own.gates.hold(num_rows * PANEL) ||
          !own.queries.hold(group() * dim) || !own.scores.hold(group() * CHUNK) ||
          !own.widened.hold(KEYS_AT_ONCE * dim) || !own.turned.hold(dim))
        return false;
    }
    int64_t most_chunks = 0;
    for (int row = 0; row < num_rows; ++row) most_chunks += batch_.context_lens[row] / CHUNK + 1;
    const int64_t num_parts = most_chunks * model_.num_kv_heads;
    const int64_t num_arrived = num_arrived_;
    if (!hidden_.hold(num_rows * model_.hidden) || !qkv_.hold(num_rows * qkv_size()) ||
        !attended_.hold(num_rows * q_size()) || !inner_.hold(num_rows * model_.inner) ||
        !partials_.hold(num_parts * group() * (dim + 2)) ||
        !chunks_.hold(most_chunks * model_.num_layers) ||
        !first_chunks_.hold(model_.num_layers + 1) ||
        !arrived_.hold(num_rows * model_.num_kv_heads))
      return false;
    if (num_arrived < num_rows * model_.num_kv_heads) {
      num_arrived_ = num_rows * model_.num_kv_heads;
      for (int64_t i = 0; i < num_arrived_; ++i) new (arrived_.get() + i) std::atomic<int>(0);
    }
    list_chunks();
    return true;
  }

  // Of each layer; the lists of layers with the same window are one.
  void list_chunks() {
    int32_t num_listed = 0;
    for (int i = 0; i < model_.num_layers; ++i) {
      int32_t* first = first_chunks_.get() + i;
      const bool is_same = i > 0 && layers_[i].window == layers_[i - 1].window;
      *first = is_same ? first[-1] : num_listed;
      if (is_same) continue;
      for (int row = 0; row < batch_.num_rows; ++row) {
        const int end = batch_.context_lens[row], window = layers_[i].window;
        const int begin = window > 0 && window < end ? end - window : 0;
        const int first_chunk = begin / CHUNK, num_chunks = (end - 1) / CHUNK - first_chunk + 1;
        for (int c = 0; c < num_chunks; ++c) {
          const int start = (first_chunk + c) * CHUNK, stop = start + CHUNK;
          chunks_.get()[num_listed++] = {row, start > begin ? start : begin,
                                         stop < end ? stop : end, c, num_chunks};
        }
      }
      first_chunks_.get()[model_.num_layers] = num_listed;
    }
  }

  static void program(void* step, Member& member) { static_cast<Step*>(step)->program(member); }

  void program(Member& member) {
    for (int i = 0; i < model_.num_layers; ++i) compute_layer(member, i);
    bool is_normed = false;
    const Matrix& head = model_.head;
    multiply(member, head, head, [&] { return normed(member, model_.norm, is_normed); },
             [&](int row, int column, __m512 sums) {
               const __m512 logits = rounded(with_bias(head, column, sums));
               _mm512_mask_storeu_ps(batch_.logits + int64_t(row) * head.num_out + column,
                                     first_lanes(head.num_out - column), logits);
             });
  }

  void compute_layer(Member& member, int index) {
    const Layer& layer = layers_[index];
    bool is_normed = false;
    multiply(member, layer.qkv, layer.output, [&] { return normed(member, layer.input_norm, is_normed); },
             [&](int row, int column, __m512 sums) {
               store_row(qkv_.get(), layer.qkv, row, column, sums);
             });
    attend(member, index);
    multiply(member, layer.output, layer.gate, [&] { return attended_.get(); },
             [&](int row, int column, __m512 sums) { add(layer.output, row, column, sums); });
    compute_inner(member, layer);
    const Matrix& after = index + 1 < model_.num_layers ? layers_[index + 1].qkv : model_.head;
    multiply(member, layer.down, after, [&] { return inner_.get(); },
             [&](int row, int column, __m512 sums) { add(layer.down, row, column, sums); });
  }

  // All rows normalised, in this thread's own memory: each thread does it, which takes less than
  // waiting until another one has.
  const bf16* normed(Member& member, const bf16* weight, bool& is_done) {
    bf16* out = own_[member.id].normed.get();
    if (!is_done) {
      for (int row = 0; row < batch_.num_rows; ++row) {
        const int64_t begin = int64_t(row) * model_.hidden;
        rms_norm(hidden_.get() + begin, weight, model_.hidden, model_.eps, out + begin);
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
      const bf16* x = input();
      const int panel = item / num_parts, part = item % num_parts;
      const uint32_t* next = panel_after(member, matrix, panel, following);
      if (num_parts == 1)
        product<4>(matrix, panel, 0, x, num_rows, next, take);
      else
        product<1>(matrix, panel, part, x, num_rows, next, take);
    });
  }

  // Panels are cut where there are few for so many threads.
  static int parts_of_panel(const Member& member, int num_panels) {
    return num_panels >= 2 * member.num_threads ? 1 : 4;
  }

  // What this thread will probably read after a panel, as the threads take turns.
  static const uint32_t* panel_after(const Member& member, const Matrix& matrix, int panel,
                                     const Matrix& following) {
    const int next = panel + member.num_threads;
    if (next < matrix.num_panels()) return matrix.panel(next);
    const int begin = next - matrix.num_panels(), last = following.num_panels() - 1;
    return following.panel(begin < last ? begin : last);
  }

  void store_row(bf16* to, const Matrix& matrix, int row, int column, __m512 sums) {
    store(to + int64_t(row) * matrix.num_out + column, with_bias(matrix, column, sums),
          first_lanes(matrix.num_out - column));
  }

  void add(const Matrix& matrix, int row, int column, __m512 sums) {
    bf16* at = hidden_.get() + int64_t(row) * matrix.num_out + column;
    const __mmask16 mask = first_lanes(matrix.num_out - column);
    store(at, _mm512_add_ps(load(at, mask), with_bias(matrix, column, sums)), mask);
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
    const bf16* x = normed(member, layer.post_norm, is_normed);
    float* gates = own_[member.id].gates.get();
    product<num_vectors>(layer.gate, panel, part, x, batch_.num_rows, layer.up.panel(panel),
                         [&](int row, int column, __m512 sums) {
                           _mm512_storeu_ps(gates + row * PANEL + column % PANEL,
                                            silu(with_bias(layer.gate, column, sums)));
                         });
    const uint32_t* next = panel_after(member, layer.gate, panel, layer.down);
    product<num_vectors>(layer.up, panel, part, x, batch_.num_rows, next,
                         [&](int row, int column, __m512 sums) {
                           const __m512 gate = _mm512_loadu_ps(gates + row * PANEL + column % PANEL);
                           const __m512 up = with_bias(layer.up, column, sums);
                           store(inner_.get() + int64_t(row) * model_.inner + column,
                                 _mm512_mul_ps(gate, up), first_lanes(model_.inner - column));
                         });
  }

  void attend(Member& member, int index) {
    const int32_t first = first_chunks_.get()[index];
    int32_t end = first_chunks_.get()[model_.num_layers];
    for (int i = index + 1; i < model_.num_layers; ++i)
      if (first_chunks_.get()[i] != first) {
        end = first_chunks_.get()[i];
        break;
      }
    member.phase((end - first) * model_.num_kv_heads, [&](int item) {
      const int chunk = first + item / model_.num_kv_heads, kv_head = item % model_.num_kv_heads;
      attend_chunk(own_[member.id], index, chunk, first, kv_head);
    });
  }

  void attend_chunk(Own& own, int index, int chunk_index, int first, int kv_head) {
    const Layer& layer = layers_[index];
    const Chunk& chunk = chunks_.get()[chunk_index];
    const int dim = model_.head_dim, row = chunk.row;
    const bf16* qkv = qkv_.get() + int64_t(row) * qkv_size();
    const bf16* rope = model_.rope + batch_.positions[row] * 2 * dim;
    if (chunk.end == batch_.context_lens[row]) write_kv(own, index, row, kv_head);
    for (int g = 0; g < group(); ++g) {
      const int head = kv_head * group() + g;
      const bf16* norm = layer.qk_norm == nullptr ? nullptr : layer.qk_norm + head * dim;
      norm_rope(qkv + head * dim, norm, model_.eps, rope, dim, own.queries.get() + g * dim);
    }
    const int64_t place = int64_t(chunk_index - first) * model_.num_kv_heads;
    const AttentionScratch scratch{own.queries.get(), own.scores.get(), own.widened.get()};
    disagg::attend(cache_, index, kv_head, batch_.block_tables + row * batch_.table_stride,
                   chunk.begin, chunk.end, group(), dim, scratch, partial(place + kv_head));
    std::atomic<int>& arrived = arrived_.get()[row * model_.num_kv_heads + kv_head];
    if (chunk.num_chunks > 1 && arrived.fetch_add(1) + 1 < chunk.num_chunks) return;
    arrived.store(0, std::memory_order_relaxed);
    join_chunks(chunk_index - first - chunk.index, chunk, kv_head);
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

  // The token's key and value, where they belong. Other code reads whole blocks, so a block that
  // begins here has zeros behind them.
  void write_kv(Own& own, int index, int row, int kv_head) {
    const int dim = model_.head_dim;
    const int64_t slot = batch_.slots[row];
    const int64_t block = slot / cache_.block_size;
    const int offset = static_cast<int>(slot % cache_.block_size);
    const bf16* key = qkv_.get() + int64_t(row) * qkv_size() + q_size() + kv_head * dim;
    const bf16* value = key + model_.num_kv_heads * dim;
    const int head = model_.num_heads + kv_head;
    const bf16* norms = layers_[index].qk_norm;
    norm_rope(key, norms == nullptr ? nullptr : norms + head * dim, model_.eps,
              model_.rope + batch_.positions[row] * 2 * dim, dim, own.turned.get());
    uint8_t* keys = cache_.page(block, index, KEYS, kv_head);
    uint8_t* values = cache_.page(block, index, VALUES, kv_head);
    if (offset == 0) {
      memset(keys, 0, cache_.page_nbytes);
      memset(values, 0, cache_.page_nbytes);
    }
    cache_.write(keys, offset, dim, own.turned.get());
    cache_.write(values, offset, dim, value);
  }

  const Model model_;
  Layer* const layers_;
  Batch batch_{};
  KVPages cache_{};
  Own* own_ = nullptr;
  int num_own_ = 0;
  int64_t num_arrived_ = 0;
  Buffer<bf16> hidden_, qkv_, attended_, inner_;
  Buffer<float> partials_;
  Buffer<Chunk> chunks_;
  Buffer<int32_t> first_chunks_;  // of each layer, and the end
  Buffer<std::atomic<int>> arrived_;  // chunks that are done, [num_rows, num_kv_heads]
  Team team_;
};

}  // namespace
}  // namespace disagg

#pragma GCC visibility push(default)
extern "C" {

// Changes with the structures.
int32_t disagg_step_version() { return 1; }

// Returns null where there is no memory. The layers are copied, the weights are not.
void* disagg_step_new(const disagg::Model* model) {
  auto* step = new (std::nothrow) disagg::Step(*model);
  if (step != nullptr && step->is_usable()) return step;
  delete step;
  return nullptr;
}

void disagg_step_free(void* step) { delete static_cast<disagg::Step*>(step); }

// Returns a `Status`; nothing is computed unless it is 0. One call at a time.
int32_t disagg_step_run(void* step, const disagg::Batch* batch, const disagg::KVPages* cache,
                        int32_t num_threads) {
  return static_cast<disagg::Step*>(step)->run(*batch, *cache, num_threads);
}
}
#pragma GCC visibility pop
