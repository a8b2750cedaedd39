// RMSNorm of rows and of heads, and the rotation of heads (RoPE).
#pragma once

#include <cmath>

#include "vectors.h"

namespace disagg {

inline float inverse_rms(const bf16* x, int size, float eps) {
  Floats squares = zeros();
  for (int i = 0; i < size; i += LANES) {
    const Floats some = load(x + i, first_lanes(size - i));
    squares = fma(some, some, squares);
  }
  return 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + eps);
}

// `place(i)` is the address for 16 numbers of bfloat16 or float32, from the `i`th on.
template <class Place>
inline void rms_norm(const bf16* x, const bf16* weight, int size, float eps, Place&& place) {
  const Floats inverse = broadcast(inverse_rms(x, size, eps));
  for (int i = 0; i < size; i += LANES) {
    const Mask mask = first_lanes(size - i);
    const Floats some = load(x + i, mask) * inverse;
    store_rounded(place(i), some * load(weight + i, mask), mask);
  }
}

// Normalises a head, if `norm` is given, and rotates it by `rope`, [2, head_dim].
inline void norm_rope(const bf16* head, const bf16* norm, float eps, const bf16* rope, int head_dim,
                      bf16* out) {
  const Floats factor = broadcast(norm == nullptr ? 1.0f : inverse_rms(head, head_dim, eps));
  const int half = head_dim / 2;
  for (int d = 0; d < half; d += LANES) {
    const Mask mask = first_lanes(half - d);
    Floats left = load(head + d, mask), right = load(head + half + d, mask);
    if (norm != nullptr) {
      left = left * factor * load(norm + d, mask);
      right = right * factor * load(norm + half + d, mask);
    }
    const bf16 *cos = rope, *sin = rope + head_dim;
    const Floats new_left = fma(left, load(cos + d, mask), right * load(sin + d, mask));
    const Floats new_right =
        fma(right, load(cos + half + d, mask), left * load(sin + half + d, mask));
    store(out + d, new_left, mask);
    store(out + half + d, new_right, mask);
  }
}

}  // namespace disagg
