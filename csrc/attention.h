// Attention of all sequences of a step, in one layer at a time, cut into items for threads.
#pragma once

#include <atomic>

#include "buffer.h"
#include "query_attention.h"
#include "tile_attention.h"

namespace disagg {

class Attention {
 public:
  // Returns false if there is not enough memory.
  bool prepare(const Attended& given, const KVPages& cache, int num_threads) {
    given_ = given;
    cache_ = cache;
    int64_t num_items = 0, num_parts = 0;
    for (int i = 0; i < given.num_sequences; ++i) num_items += items_of(given.sequences[i], num_parts);
    num_parts *= given.num_kv_heads;
    if (!own_.hold(num_threads) || !items_.hold(num_items) || !sequences_.hold(given.num_tokens) ||
        !partials_.hold(num_parts * given.group() * (given.head_dim + 2)) || !arrived_.hold(num_parts))
      return false;
    for (int64_t i = 0; i < num_parts; ++i) new (arrived_.get() + i) std::atomic<int>(0);
    const int num_queries = num_items == num_parts / given.num_kv_heads
                                ? 0 : TileAttention::queries_of_item(given);
    for (int i = 0; i < num_threads; ++i) {
      Own& own = own_[i];
      if (!own.scores.hold(given.group() * CHUNK) || !own.widened.hold(KEYS_AT_ONCE * given.head_dim) ||
          (num_queries > 0 && !own.of_tiles.hold(num_queries * given.group(), given.head_dim,
                                                 TileAttention::depth(given))))
        return false;
    }
    num_items_ = num_parts_ = 0;
    for (const Sequence* each = given.sequences; each < given.sequences + given.num_sequences; ++each)
      for (int token = each->start; token < each->end; ++token) sequences_.get()[token] = each;
    for (const bool is_alone : {false, true})  // the longest items first
      for (int i = 0; i < given.num_sequences; ++i)
        if (bool(given.sequences[i].is_alone) == is_alone) list(given.sequences[i]);
    return true;
  }

  // One thread calls it, while no thread computes attention.
  void set_layer(const LayerPlace& place, int window) {
    given_.place = place;
    given_.window = window;
  }

  int position(int token) const { return sequences_.get()[token]->position(token); }

  // Stores the keys and values of a token in the cache, in a layer that may not be set yet: other
  // threads write while one sets it.
  void write(const LayerPlace& place, int token) {
    const Sequence& sequence = *sequences_.get()[token];
    const int position = sequence.position(token), size = cache_.block_size;
    const int64_t block = sequence.blocks(place)[position / size];
    for (int vector = 0; vector < given_.num_vectors; ++vector)
      for (int kv_head = 0; kv_head < given_.num_kv_heads; ++kv_head)
        cache_.write(cache_.page(block, place.layer, Half(vector), kv_head), position % size,
                     given_.head_dim,
                     given_.head(token, given_.num_heads + vector * given_.num_kv_heads + kv_head));
  }

  int num_items() const { return num_items_ * given_.num_kv_heads; }

  // `thread` is below the number of prepared threads, and computes one item at a time.
  void attend(int thread, int index) {
    const Item& item = items_.get()[index / given_.num_kv_heads];
    const int kv_head = index % given_.num_kv_heads;
    if (item.part < 0)
      TileAttention(given_, cache_, own_[thread].of_tiles)
          .attend(*item.sequence, item.begin, item.end, kv_head);
    else
      attend_part(own_[thread], item, kv_head);
  }

 private:
  // Some tokens of a sequence, or a chunk of the context of one token.
  struct Item {
    const Sequence* sequence;
    int32_t begin, end;
    int32_t chunk;
    int64_t part;  // the place of the token's first chunk among the chunks of all; -1: no chunk
  };
  struct Own {  // the memory of one thread
    Buffer<float> scores;
    Buffer<bf16> widened;
    TileScratch of_tiles;
  };

  static int chunks_of(int context_len) { return (context_len - 1) / CHUNK + 1; }

  int64_t items_of(const Sequence& sequence, int64_t& num_parts) const {
    const int num_tokens = sequence.end - sequence.start;
    if (!sequence.is_alone) return num_tokens / TileAttention::queries_of_item(given_) + 1;
    num_parts += num_tokens * chunks_of(sequence.context_len);
    return num_tokens * chunks_of(sequence.context_len);
  }

  void list(const Sequence& sequence) {
    if (sequence.is_alone) {
      for (int token = sequence.start; token < sequence.end; ++token) {
        const int64_t part = num_parts_;
        num_parts_ += chunks_of(sequence.position(token) + 1);
        for (int chunk = 0; part + chunk < num_parts_; ++chunk)
          items_.get()[num_items_++] = {&sequence, token, token + 1, chunk, part};
      }
      return;
    }
    // The last queries see the most keys, so they come first.
    for (int end = sequence.end; end > sequence.start; end -= TileAttention::queries_of_item(given_)) {
      const int begin = end - TileAttention::queries_of_item(given_);
      items_.get()[num_items_++] = {&sequence, begin > sequence.start ? begin : sequence.start, end, 0, -1};
    }
  }

  void attend_part(Own& own, const Item& item, int kv_head) {
    const int end = item.sequence->position(item.begin) + 1;
    const int begin = given_.window > 0 && given_.window < end ? end - given_.window : 0;
    const int first = begin / CHUNK, num_chunks = chunks_of(end) - first;
    const int start = item.chunk * CHUNK, stop = start + CHUNK;
    if (item.chunk < first) return;  // beyond the window
    auto part = [&](int chunk) { return partial((item.part + chunk) * given_.num_kv_heads + kv_head); };
    attend_chunk(given_, cache_, item.sequence->blocks(given_.place), item.begin, kv_head,
                 start > begin ? start : begin, stop < end ? stop : end, own.scores.get(),
                 own.widened.get(), part(item.chunk));
    std::atomic<int>& arrived = arrived_.get()[item.part * given_.num_kv_heads + kv_head];
    if (num_chunks > 1 && arrived.fetch_add(1) + 1 < num_chunks) return;
    // The thread that computed the last chunk combines them all.
    arrived.store(0, std::memory_order_relaxed);
    join(given_, item.begin, kv_head, num_chunks, [&](int chunk) { return part(first + chunk); });
  }

  Partial partial(int64_t place) const {
    const int64_t size = given_.group() * given_.head_dim;
    float* at = partials_.get() + place * (size + 2 * given_.group());
    return {at, at + size, at + size + given_.group()};
  }

  Attended given_{};
  KVPages cache_{};
  PerThread<Own> own_;
  Buffer<Item> items_;
  Buffer<const Sequence*> sequences_;  // of each token
  Buffer<float> partials_;
  Buffer<std::atomic<int>> arrived_;  // chunks that are done
  int64_t num_items_ = 0, num_parts_ = 0;
};

}  // namespace disagg
