// RMSNorm of rows and of heads, and the turn of a head to its position.
#pragma once

#include <cmath>

#include "vectors.h"

namespace disagg {

inline float inverse_rms(const bf16* x, int size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += LANES) {
    const __m512 some = load(x + i, first_lanes(size - i));
    squares = _mm512_fmadd_ps(some, some, squares);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps);
}

// `place(i)` is where 16 numbers go, from the `i`th on.
template <class Place>
inline void rms_norm(const bf16* x, const bf16* weight, int size, float eps, Place&& place) {
  const __m512 inverse = _mm512_set1_ps(inverse_rms(x, size, eps));
  for (int i = 0; i < size; i += LANES) {
    const __mmask16 mask = first_lanes(size - i);
    const __m512 some = _mm512_mul_ps(load(x + i, mask), inverse);
    store(place(i), _mm512_mul_ps(some, load(weight + i, mask)), mask);
  }
}

// A head normalised, if `norm` is given, and turned to its position by `rope`, [2, head_dim].
inline void norm_rope(const bf16* head, const bf16* norm, float eps, const bf16* rope, int head_dim,
                      bf16* out) {
  const __m512 factor = _mm512_set1_ps(norm == nullptr ? 1.0f : inverse_rms(head, head_dim, eps));
  const int half = head_dim / 2;
  for (int d = 0; d < half; d += LANES) {
    const __mmask16 mask = first_lanes(half - d);
    __m512 left = load(head + d, mask), right = load(head + half + d, mask);
    if (norm != nullptr) {
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

}  // namespace disagg
