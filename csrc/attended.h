// What attention reads and writes in one layer of a step.
#pragma once

#include "kv_format.h"
#include "model.h"
#include "rows.h"

namespace disagg {

struct Attended {
  const bf16* qkv;  // [num_tokens, num_heads + num_vectors * num_kv_heads, head_dim], after RoPE
  Rows out;         // [num_tokens, num_heads * head_dim]
  const Sequence* sequences;
  int32_t num_tokens, num_sequences, num_heads, num_kv_heads, num_vectors, head_dim;
  LayerPlace place;
  int32_t window;       // positions that a token sees, itself included; 0: all
  const float* sinks;   // [num_heads]; null: none
  float scale, cap;     // a score is cap * tanh(product * scale / cap); cap 0: product * scale

  int group() const { return num_heads / num_kv_heads; }
  const bf16* head(int64_t token, int index) const {
    return qkv + (token * (num_heads + num_vectors * num_kv_heads) + index) * head_dim;
  }
  // Of the heads that share a KV head, [group, head_dim].
  const bf16* queries(int64_t token, int kv_head) const { return head(token, kv_head * group()); }
};

inline Floats capped(Floats products, float scale, float cap) {
  const Floats scores = products * broadcast(scale);
  return cap > 0 ? broadcast(cap) * hyperbolic_tangent(scores / broadcast(cap)) : scores;
}

}  // namespace disagg
