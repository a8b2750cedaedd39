// Vectors of 16 numbers with AVX-512, with or without its instructions for bfloat16. The twin is
// avx2.h; vectors.h has the common code.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace disagg {

using Floats = __m512;
using Words = __m512i;  // of 32 bits
using Mask = __mmask16;

constexpr bool HAS_32_REGISTERS = true;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Words zero_words() { return _mm512_setzero_si512(); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Words broadcast_word(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
inline void store(float* to, Floats values, Mask mask) {
  _mm512_mask_storeu_ps(to, mask, values);
}
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline Words load_words(const void* from, Mask mask) {
  return _mm512_maskz_loadu_epi32(mask, from);
}
inline void store_words(void* to, Words words) { _mm512_storeu_si512(to, words); }

inline Floats as_floats(Words bits) { return _mm512_castsi512_ps(bits); }
inline Words as_words(Floats bits) { return _mm512_castps_si512(bits); }
inline Floats to_floats(Words numbers) { return _mm512_cvtepi32_ps(numbers); }
inline Words nearest(Floats values) { return _mm512_cvtps_epi32(values); }
inline Words from_signed_bytes(__m128i bytes) { return _mm512_cvtepi8_epi32(bytes); }
inline Words from_halves(__m256i halves) { return _mm512_cvtepu16_epi32(halves); }
inline __m128i low_bytes(Words words) { return _mm512_cvtepi32_epi8(words); }

inline Words shift_left(Words words, int count) { return _mm512_slli_epi32(words, count); }
inline Words shift_right(Words words, int count) { return _mm512_srli_epi32(words, count); }
inline Words add_words(Words one, Words other) { return _mm512_add_epi32(one, other); }
inline Words subtract_words(Words one, Words other) { return _mm512_sub_epi32(one, other); }
inline Words smaller_words(Words one, Words other) { return _mm512_min_epi32(one, other); }

// one * other + summand, rounded once.
inline Floats fma(Floats one, Floats other, Floats summand) {
  return _mm512_fmadd_ps(one, other, summand);
}
inline void add_product(Floats& acc, Floats one, Floats other) { acc = fma(one, other, acc); }
// Of a NaN and a number, returns the second argument.
inline Floats larger(Floats one, Floats other) { return _mm512_max_ps(one, other); }
inline Floats smaller(Floats one, Floats other) { return _mm512_min_ps(one, other); }
inline Floats absolute(Floats values) { return _mm512_abs_ps(values); }
inline Floats to_whole(Floats values) {
  return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// The fractional parts: the numbers minus the integers below them; 0 for -infinity.
inline Floats above_whole(Floats values) {
  return _mm512_reduce_ps(values, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
// Multiplied by 2 to the power of `powers`, rounded down to integers.
inline Floats scaled(Floats values, Floats powers) { return _mm512_scalef_ps(values, powers); }

inline float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }
inline float largest_of(Floats values) { return _mm512_reduce_max_ps(values); }
inline float least_of(Floats values) { return _mm512_reduce_min_ps(values); }

inline Mask greater(Floats one, Floats other) {
  return _mm512_cmp_ps_mask(one, other, _CMP_GT_OQ);
}
inline Floats select(Mask mask, Floats values, Floats others) {
  return _mm512_mask_mov_ps(others, mask, values);
}
// `values` where `one` is less than `other`.
inline Words where_less(Floats one, Floats other, Words values, Words others) {
  return _mm512_mask_mov_epi32(others, _mm512_cmp_ps_mask(one, other, _CMP_LT_OQ), values);
}
inline Words where_less(Words one, Words other, Words values, Words others) {
  return _mm512_mask_mov_epi32(others, _mm512_cmplt_epi32_mask(one, other), values);
}

// From each quarter, the first or the last two words of both, interleaved.
inline Floats unpack_low(Floats one, Floats other) { return _mm512_unpacklo_ps(one, other); }
inline Floats unpack_high(Floats one, Floats other) { return _mm512_unpackhi_ps(one, other); }
// From each quarter, the first or the last two words of one and then of the other.
inline Floats low_pairs(Floats one, Floats other) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(one), _mm512_castps_pd(other)));
}
inline Floats high_pairs(Floats one, Floats other) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(one), _mm512_castps_pd(other)));
}
// Quarters 0 and 2, or 1 and 3, of one and then of the other.
inline Floats even_quarters(Floats one, Floats other) {
  return _mm512_shuffle_f32x4(one, other, 0x88);
}
inline Floats odd_quarters(Floats one, Floats other) {
  return _mm512_shuffle_f32x4(one, other, 0xDD);
}

inline Floats load(const bf16* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return as_floats(shift_left(from_halves(halves), 16));
}
inline Floats load(const bf16* from, Mask mask) {
  return as_floats(shift_left(from_halves(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

#ifdef __AVX512BF16__

// Rounded to nearest, half to even.
inline __m256i narrowed(Floats values) {
  const __m256bh rounded = _mm512_cvtneps_pbh(values);
  __m256i bits;
  memcpy(&bits, &rounded, sizeof bits);
  return bits;
}

// acc + the dot products of neighbouring pairs.
inline Floats dot_pairs(Floats acc, Words left, Words right) {
  __m512bh one, other;
  memcpy(&one, &left, sizeof one);
  memcpy(&other, &right, sizeof other);
  return _mm512_dpbf16_ps(acc, one, other);
}

#else  // the same with instructions that every CPU with AVX-512 has

// The upper halves of the words are the rounded numbers; the lower halves are undefined.
inline Words rounded_up(Floats values) {
  const Words bits = as_words(values);
  // Add half of the last kept digit, minus one if that digit is even; a carry moves up.
  const Words last = shift_right(bits, 16) & broadcast_word(1);
  Words up = add_words(bits, add_words(last, broadcast_word(0x7FFF)));
  // NaN stays NaN: it becomes quiet, and no carry changes it to something else.
  const Mask is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, is_nan, bits, broadcast_word(0x400000));
  return up;
}
inline __m256i narrowed(Floats values) {
  return _mm512_cvtepi32_epi16(shift_right(rounded_up(values), 16));
}

#endif

inline void store(bf16* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(values));
}
// Zen CPUs take many times longer to write under a mask, so a full mask is handled separately.
inline void store(bf16* to, Floats values, Mask mask) {
  if (mask == 0xFFFF) return store(to, values);
  _mm256_mask_storeu_epi16(to, mask, narrowed(values));
}

using NibblePairs = Words;

// Converts the lowest 4 bits of each 16-bit word to a bfloat16 number.
class Nibbles {
 public:
  Nibbles() {
    alignas(64) bf16 table[32];  // the numbers 0 to 15, twice, because five bits of an index are used
    for (int i = 0; i < 32; ++i) table[i] = bf16_of(static_cast<float>(i % 16));
    table_ = load_words(table);
  }
  // Looks up the words after shifting them to the right.
  NibblePairs pairs(Words words, int shift) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, shift), table_);
  }

 private:
  Words table_;
};

}  // namespace disagg
