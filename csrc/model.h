// The inputs of a step: weights, and the sequences of one step. `disagg/kernels/cpu/step.py` and
// `prompts.py` have the same structures. The caller owns all memory.
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
  const bf16* norm;       // [hidden]
  Matrix head;
  Matrix table;  // embeddings of fewer than 16 bits; often the same as the head
  const Layer* layers;
};

struct Batch {
  const int64_t* token_ids;      // [num_rows]
  const int64_t* positions;      // [num_rows]
  const int64_t* slots;          // [num_rows]: KV slots, block * block_size + offset
  const int32_t* context_lens;   // [num_rows]: positions with KV after this step
  const int32_t* block_tables;   // [num_rows, table_stride]
  int64_t table_stride;
  int32_t num_rows;
  int32_t has_chunks;  // whether some rows are consecutive tokens of one sequence, in order
  float* logits;  // [num_rows, vocab]
};

// Tokens `start` to `end` of a step: the last ones of a sequence's context.
struct PromptChunk {
  int32_t start, end, context_len;
  const int32_t* blocks;
};

struct Prompts {
  const bf16* qkv;  // [num_tokens, num_heads + 2 * num_kv_heads, head_dim], after RoPE
  bf16* out;        // [num_tokens, num_heads * head_dim]
  const PromptChunk* chunks;
  int32_t num_chunks;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t layer;
  int32_t window;      // positions that a token sees, itself included; 0: all
  const float* sinks;  // [num_heads]; null: none
  int32_t is_out_tiled;  // whether `out` has the layout of `TiledRows`
};

enum Status : int32_t { DONE = 0, NO_MEMORY = 1, UNKNOWN_TOKEN = 2 };

}  // namespace disagg
