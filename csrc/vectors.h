// Vectors of 16 numbers, float32 or 32-bit words: with AVX-512, or with AVX2 as two vectors of 8.
#pragma once

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace disagg {

constexpr int LANES = 16;

// How many of 1 or 4 vectors of columns are multiplied with so many rows at once, such that the sums
// stay in registers.
constexpr int vectors_at_once(int num_rows, int num_vectors) {
  const int most = HAS_32_REGISTERS || num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1;
  return num_vectors < most ? num_vectors : most;
}

// The first and the second numbers of pairs of bfloat16.
inline Floats low_of(Words pairs) { return as_floats(shift_left(pairs, 16)); }
inline Floats high_of(Words pairs) { return as_floats(pairs & broadcast_word(0xFFFF0000)); }

// Rounded to bfloat16.
#ifdef __AVX512BF16__
inline Floats rounded(Floats values) {
  return as_floats(shift_left(from_halves(narrowed(values)), 16));
}
#else
inline Floats rounded(Floats values) { return high_of(rounded_up(values)); }

// acc + the dot products of neighbouring pairs.
inline Floats dot_pairs(Floats acc, Words left, Words right) {
  acc = fma(low_of(left), low_of(right), acc);
  return fma(high_of(left), high_of(right), acc);
}

#endif

// The first `count` of 16 lanes: all for a larger count, none for one below 0.
inline Mask first_lanes(int count) {
  if (count >= LANES) return 0xFFFF;
  return count <= 0 ? 0 : Mask((1u << count) - 1);
}

// Stores numbers that are rounded to bfloat16.
inline void store_rounded(bf16* to, Floats values) { store(to, values); }
inline void store_rounded(bf16* to, Floats values, Mask mask) { store(to, values, mask); }
inline void store_rounded(float* to, Floats values) { store(to, rounded(values)); }
inline void store_rounded(float* to, Floats values, Mask mask) { store(to, rounded(values), mask); }

// Copies the numbers of a row, and widens them if `to` is float32.
inline void copy_row(const bf16* from, int count, bf16* to) {
  memcpy(to, from, sizeof(bf16) * count);
}
inline void copy_row(const bf16* from, int count, float* to) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = wide_of(from[i]);
}

// e^x within two units in the last place, with correct results of 0, infinity and NaN.
inline Floats exponential(Floats x) {
  // Beyond these bounds the result is 0 or infinite, and the steps below would give NaN. If the second
  // argument is NaN, it is kept.
  x = smaller(broadcast(89.0f), larger(broadcast(-104.0f), x));
  const Floats power = to_whole(x * broadcast(1.44269504f));
  // The remainder of x in two steps, because ln 2 has more digits than a float32.
  Floats rest = fma(power, broadcast(-0.693145752f), x);
  rest = fma(power, broadcast(-1.42860677e-6f), rest);
  // The Taylor series, on |rest| <= ln 2 / 2.
  Floats sum = broadcast(1.0f / 5040);
  const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float factor : factors) sum = fma(sum, rest, broadcast(factor));
  return scaled(sum, power);
}

// 2^x with a relative error of at most 3e-6; 0 for -infinity.
inline Floats power_of_two(Floats x) {
  const Floats rest = above_whole(x);
  // The polynomial of degree 4 with the smallest maximal relative error on 0 to 1.
  Floats sum = broadcast(0.0135341678f);
  const float factors[] = {0.0520114601f, 0.241442755f, 0.693003833f, 1.00000262f};
  for (float factor : factors) sum = fma(sum, rest, broadcast(factor));
  return scaled(sum, x);
}

inline Floats silu(Floats x) {
  return x / (broadcast(1.0f) + exponential(zeros() - x));
}

}  // namespace disagg
