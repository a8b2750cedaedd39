// bfloat16 and float32 vectors of AVX-512, with or without its instructions for bfloat16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace disagg {

using bf16 = uint16_t;  // the upper half of a float32

constexpr int LANES = 16;

inline float wide_of(bf16 narrow) {
  const uint32_t wide = uint32_t(narrow) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

inline __m512 load(const bf16* from) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load(const bf16* from, __mmask16 mask) {
  __m256i halves = _mm256_maskz_loadu_epi16(mask, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

#ifdef __AVX512BF16__

// Rounded to the nearest, to even.
inline __m256i narrowed(__m512 values) {
  __m256bh rounded = _mm512_cvtneps_pbh(values);
  __m256i bits;
  memcpy(&bits, &rounded, sizeof bits);
  return bits;
}

// acc + the dot products of neighbouring pairs.
inline __m512 dot_pairs(__m512 acc, __m512i left, __m512i right) {
  __m512bh one, other;
  memcpy(&one, &left, sizeof one);
  memcpy(&other, &right, sizeof other);
  return _mm512_dpbf16_ps(acc, one, other);
}

#else  // the same from instructions that every AVX-512 has

inline __m256i narrowed(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  // Half of the last digit that stays, less one if that digit is even; a carry goes up.
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7FFF)));
  // A NaN stays one: it becomes quiet, and no carry makes it something else.
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

inline __m512 dot_pairs(__m512 acc, __m512i left, __m512i right) {
  const __m512i upper = _mm512_set1_epi32(0xFFFF0000);
  const auto low = [](__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); };
  const auto high = [&](__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
  };
  acc = _mm512_fmadd_ps(low(left), low(right), acc);
  return _mm512_fmadd_ps(high(left), high(right), acc);
}

#endif

inline void store(bf16* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(values));
}

// A Zen takes many times longer to write under a mask, so a full one is looked for.
inline void store(bf16* to, __m512 values, __mmask16 mask) {
  if (mask == 0xFFFF) return store(to, values);
  _mm256_mask_storeu_epi16(to, mask, narrowed(values));
}

inline __m512 rounded(__m512 values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(values)), 16));
}

// The first `count` of 16 lanes: all for a larger count, none for one below 0.
inline __mmask16 first_lanes(int count) {
  if (count >= LANES) return 0xFFFF;
  return count <= 0 ? 0 : __mmask16((1u << count) - 1);
}

// e^x within two units in the last place; 0, infinity and NaN where they belong.
inline __m512 exponential(__m512 x) {
  // Beyond these it is 0 or infinite, and the steps below would make NaN. The second of two stays
  // if it is NaN.
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // The rest of x in two steps, as ln 2 has more digits than a float32.
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693145752f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(1.42860677e-6f), rest);
  // The Taylor series, on |rest| <= ln 2 / 2.
  __m512 sum = _mm512_set1_ps(1.0f / 5040);
  const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float factor : factors) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, whole);
}

// 2^x within 3e-6 of it; 0 for -infinity.
inline __m512 power_of_two(__m512 x) {
  // x less the whole number below it; 0 for -infinity.
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  // The polynomial of degree 4 whose largest relative error on 0 to 1 is least.
  __m512 sum = _mm512_set1_ps(0.0135341678f);
  const float factors[] = {0.0520114601f, 0.241442755f, 0.693003833f, 1.00000262f};
  for (float factor : factors) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, x);  // which takes the whole number below x
}

inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 inverse = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(one, inverse));
}

}  // namespace disagg
