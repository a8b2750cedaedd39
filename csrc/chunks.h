// Cuts the attention of a step into chunks of contexts, always at the same positions, so that a result
// does not depend on threads or on other sequences.
#pragma once

#include "attention.h"
#include "buffer.h"
#include "model.h"

namespace disagg {

// A part of one sequence's context, for one KV head at a time.
struct Chunk {
  int32_t row, begin, end;
  int32_t index, num_chunks;  // of its sequence
};

// The chunks of each layer. Neighbouring layers with the same window share them.
class ChunkLists {
 public:
  struct Range {
    int32_t begin, end;
  };

  // The largest number of chunks of any layer.
  static int64_t most_chunks(const Batch& batch) {
    int64_t most = 0;
    for (int row = 0; row < batch.num_rows; ++row) most += batch.context_lens[row] / CHUNK + 1;
    return most;
  }

  // Returns false if there is not enough memory.
  bool list(const Layer* layers, int num_layers, const Batch& batch) {
    if (!chunks_.hold(most_chunks(batch) * num_layers) || !ranges_.hold(num_layers)) return false;
    int32_t num_listed = 0;
    for (int i = 0; i < num_layers; ++i) {
      Range& range = ranges_.get()[i];
      if (i > 0 && layers[i].window == layers[i - 1].window) {
        range = ranges_.get()[i - 1];
        continue;
      }
      range.begin = num_listed;
      for (int row = 0; row < batch.num_rows; ++row)
        num_listed = add(row, batch.context_lens[row], layers[i].window, num_listed);
      range.end = num_listed;
    }
    return true;
  }

  Range of_layer(int index) const { return ranges_.get()[index]; }
  const Chunk& chunk(int index) const { return chunks_.get()[index]; }

 private:
  int32_t add(int row, int end, int window, int32_t num_listed) {
    const int begin = window > 0 && window < end ? end - window : 0;
    const int first = begin / CHUNK, num_chunks = (end - 1) / CHUNK - first + 1;
    for (int c = 0; c < num_chunks; ++c) {
      const int start = (first + c) * CHUNK, stop = start + CHUNK;
      chunks_.get()[num_listed++] = {row, start > begin ? start : begin, stop < end ? stop : end, c,
                                     num_chunks};
    }
    return num_listed;
  }

  Buffer<Chunk> chunks_;
  Buffer<Range> ranges_;
};

}  // namespace disagg
