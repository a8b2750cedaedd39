// The inputs of a step: weights, and the sequences of one step. `disagg/kernels/cpu/step.py` and
// `attention.py` have the same structures. The caller owns all memory.
#pragma once

#include "product.h"
#include "vectors.h"

namespace disagg {

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
  const bf16* embedding;  // [vocab, hidden]; null: `table`
  const bf16* rope;       // [num_positions, 2, head_dim]: cosines, and sines with signs
  const bf16* norm;        // [hidden]
  const bf16* state_norm;  // [hidden]; null: the model needs no states
  Matrix head;
  Matrix table;  // embeddings of fewer than 16 bits; often the same as the head
  const Layer* layers;
};

// Where the KV of a layer is (`disagg/kv_groups.py`).
struct LayerPlace {
  int32_t table;  // where the block table of the layer's group begins in `Sequence::tables`
  int32_t layer;  // the layer's number in the blocks of the group
};

// The tokens `start` to `end` of a step: the last ones of a sequence's context.
struct Sequence {
  int32_t start, end, context_len;
  // Whether each token reads keys alone: a decode, or the tokens of a draft, which then have the
  // results that they would have one by one.
  int32_t is_alone;
  const int32_t* tables;  // block tables of all groups of layers, one after the other

  int position(int token) const { return context_len - (end - token); }
  // The blocks of a layer.
  const int32_t* blocks(const LayerPlace& place) const { return tables + place.table; }
};

struct Batch {
  const int64_t* token_ids;    // [num_tokens]
  const bf16* states;          // [num_tokens, hidden], of another model, if this one needs them
  const Sequence* sequences;   // in the order of their tokens
  const LayerPlace* places;    // [num_layers]
  const int64_t* logits_rows;  // [num_logits]: tokens that are computed after the last attention
  bf16* hidden;   // [num_logits, hidden]: their states after the last norm; null: not needed
  bf16* made;     // the same before it
  float* logits;  // [num_logits, vocab]; null: not needed
  int32_t num_tokens, num_sequences, num_logits;
  // Whether each token is computed as if it were alone in the step, which is fast for a few.
  int32_t is_each_alone;
};

// The layers before which a step copies its states.
struct Kept {
  const int32_t* layers;
  int32_t num_layers;
  bf16* out;  // [num_tokens, num_layers, hidden]
};

enum Status : int32_t { DONE = 0, NO_MEMORY = 1, UNKNOWN_TOKEN = 2 };

}  // namespace disagg
