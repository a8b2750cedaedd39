// Vectors of 16 numbers as two of 8, with AVX2 and FMA. The twin is avx512.h, which describes the
// functions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace disagg {

struct Floats {
  __m256 low, high;
};

struct Words {
  __m256i low, high;
};

using Mask = uint16_t;

constexpr bool HAS_32_REGISTERS = false;

inline Floats operator+(Floats one, Floats other) {
  return {_mm256_add_ps(one.low, other.low), _mm256_add_ps(one.high, other.high)};
}
inline Floats operator-(Floats one, Floats other) {
  return {_mm256_sub_ps(one.low, other.low), _mm256_sub_ps(one.high, other.high)};
}
inline Floats operator*(Floats one, Floats other) {
  return {_mm256_mul_ps(one.low, other.low), _mm256_mul_ps(one.high, other.high)};
}
inline Floats operator/(Floats one, Floats other) {
  return {_mm256_div_ps(one.low, other.low), _mm256_div_ps(one.high, other.high)};
}
inline Words operator&(Words one, Words other) {
  return {_mm256_and_si256(one.low, other.low), _mm256_and_si256(one.high, other.high)};
}
inline Words operator|(Words one, Words other) {
  return {_mm256_or_si256(one.low, other.low), _mm256_or_si256(one.high, other.high)};
}

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Floats broadcast(float value) {
  const __m256 all = _mm256_set1_ps(value);
  return {all, all};
}
inline Words broadcast_word(uint32_t word) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(word));
  return {all, all};
}

// All bits of the lanes in the mask.
inline Words lanes_of(Mask mask) {
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i high = _mm256_slli_epi32(low, 8), bits = _mm256_set1_epi32(mask);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(bits, low), low),
          _mm256_cmpeq_epi32(_mm256_and_si256(bits, high), high)};
}

inline Floats load(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
inline Floats load(const float* from, Mask mask) {
  if (mask == 0xFFFF) return load(from);
  const Words lanes = lanes_of(mask);
  return {_mm256_maskload_ps(from, lanes.low), _mm256_maskload_ps(from + 8, lanes.high)};
}
inline void store(float* to, Floats values) {
  _mm256_storeu_ps(to, values.low);
  _mm256_storeu_ps(to + 8, values.high);
}
inline void store(float* to, Floats values, Mask mask) {
  if (mask == 0xFFFF) return store(to, values);
  const Words lanes = lanes_of(mask);
  _mm256_maskstore_ps(to, lanes.low, values.low);
  _mm256_maskstore_ps(to + 8, lanes.high, values.high);
}
inline Words load_words(const void* from) {
  const auto* halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Words load_words(const void* from, Mask mask) {
  if (mask == 0xFFFF) return load_words(from);
  const Words lanes = lanes_of(mask);
  const auto* words = static_cast<const int*>(from);
  return {_mm256_maskload_epi32(words, lanes.low), _mm256_maskload_epi32(words + 8, lanes.high)};
}
inline void store_words(void* to, Words words) {
  auto* halves = static_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, words.low);
  _mm256_storeu_si256(halves + 1, words.high);
}

inline Floats as_floats(Words bits) {
  return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
}
inline Words as_words(Floats bits) {
  return {_mm256_castps_si256(bits.low), _mm256_castps_si256(bits.high)};
}
inline Floats to_floats(Words numbers) {
  return {_mm256_cvtepi32_ps(numbers.low), _mm256_cvtepi32_ps(numbers.high)};
}
inline Words nearest(Floats values) {
  return {_mm256_cvtps_epi32(values.low), _mm256_cvtps_epi32(values.high)};
}
inline Words from_signed_bytes(__m128i bytes) {
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Words from_halves(__m256i halves) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(halves)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(halves, 1))};
}
// For words that fit into unsigned 16 bits.
inline __m256i low_halves(Words words) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(words.low, words.high), 0xD8);
}
inline __m128i low_bytes(Words words) {
  const __m256i halves = low_halves(words & broadcast_word(0xFF));
  return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

inline Words shift_left(Words words, int count) {
  return {_mm256_slli_epi32(words.low, count), _mm256_slli_epi32(words.high, count)};
}
inline Words shift_right(Words words, int count) {
  return {_mm256_srli_epi32(words.low, count), _mm256_srli_epi32(words.high, count)};
}
inline Words add_words(Words one, Words other) {
  return {_mm256_add_epi32(one.low, other.low), _mm256_add_epi32(one.high, other.high)};
}
inline Words subtract_words(Words one, Words other) {
  return {_mm256_sub_epi32(one.low, other.low), _mm256_sub_epi32(one.high, other.high)};
}
inline Words smaller_words(Words one, Words other) {
  return {_mm256_min_epi32(one.low, other.low), _mm256_min_epi32(one.high, other.high)};
}

inline Floats fma(Floats one, Floats other, Floats summand) {
  return {_mm256_fmadd_ps(one.low, other.low, summand.low),
          _mm256_fmadd_ps(one.high, other.high, summand.high)};
}
// Adds in the register of `acc`. gcc would choose others, and spill the sums of large tiles.
[[gnu::always_inline]] inline void add_product(Floats& acc, Floats one, Floats other) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.low) : "x"(one.low), "x"(other.low));
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.high) : "x"(one.high), "x"(other.high));
}
inline Floats larger(Floats one, Floats other) {
  return {_mm256_max_ps(one.low, other.low), _mm256_max_ps(one.high, other.high)};
}
inline Floats smaller(Floats one, Floats other) {
  return {_mm256_min_ps(one.low, other.low), _mm256_min_ps(one.high, other.high)};
}
inline Floats absolute(Floats values) {
  return as_floats(as_words(values) & broadcast_word(0x7FFFFFFF));
}
inline Floats to_whole(Floats values) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(values.low, NEAREST), _mm256_round_ps(values.high, NEAREST)};
}

// Larger and smaller powers of two, times any number near 1, are infinite or 0. NaN stays NaN.
inline Floats clamped(Floats powers) {
  return smaller(broadcast(250.0f), larger(broadcast(-250.0f), powers));
}
inline Floats whole_below(Floats values) {
  return {_mm256_floor_ps(values.low), _mm256_floor_ps(values.high)};
}
inline Floats above_whole(Floats values) {
  values = clamped(values);
  return values - whole_below(values);
}
inline Floats scaled(Floats values, Floats powers) {
  const Words whole = nearest(whole_below(clamped(powers)));
  // In two steps, because float32 cannot represent a power of two that is so small or so large.
  const Words half{_mm256_srai_epi32(whole.low, 1), _mm256_srai_epi32(whole.high, 1)};
  auto power = [](Words exponents) {
    return as_floats(shift_left(add_words(exponents, broadcast_word(127)), 23));
  };
  return values * power(half) * power(subtract_words(whole, half));
}

inline float sum_of(Floats values) {
  const __m256 eight = _mm256_add_ps(values.low, values.high);
  __m128 some = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  some = _mm_add_ps(some, _mm_movehl_ps(some, some));
  return _mm_cvtss_f32(_mm_add_ss(some, _mm_movehdup_ps(some)));
}
inline float largest_of(Floats values) {
  const __m256 eight = _mm256_max_ps(values.low, values.high);
  __m128 some = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  some = _mm_max_ps(some, _mm_movehl_ps(some, some));
  return _mm_cvtss_f32(_mm_max_ss(some, _mm_movehdup_ps(some)));
}
inline float least_of(Floats values) { return -largest_of(zeros() - values); }

inline Mask greater(Floats one, Floats other) {
  return _mm256_movemask_ps(_mm256_cmp_ps(one.low, other.low, _CMP_GT_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(one.high, other.high, _CMP_GT_OQ)) << 8;
}
inline Floats select(Floats lanes, Floats values, Floats others) {
  return {_mm256_blendv_ps(others.low, values.low, lanes.low),
          _mm256_blendv_ps(others.high, values.high, lanes.high)};
}
inline Floats select(Mask mask, Floats values, Floats others) {
  return mask == 0xFFFF ? values : select(as_floats(lanes_of(mask)), values, others);
}
inline Words where_less(Floats one, Floats other, Words values, Words others) {
  const Floats lanes{_mm256_cmp_ps(one.low, other.low, _CMP_LT_OQ),
                     _mm256_cmp_ps(one.high, other.high, _CMP_LT_OQ)};
  return as_words(select(lanes, as_floats(values), as_floats(others)));
}
inline Words where_less(Words one, Words other, Words values, Words others) {
  const Words lanes{_mm256_cmpgt_epi32(other.low, one.low),
                    _mm256_cmpgt_epi32(other.high, one.high)};
  return as_words(select(as_floats(lanes), as_floats(values), as_floats(others)));
}

inline Floats unpack_low(Floats one, Floats other) {
  return {_mm256_unpacklo_ps(one.low, other.low), _mm256_unpacklo_ps(one.high, other.high)};
}
inline Floats unpack_high(Floats one, Floats other) {
  return {_mm256_unpackhi_ps(one.low, other.low), _mm256_unpackhi_ps(one.high, other.high)};
}
inline Floats low_pairs(Floats one, Floats other) {
  return {_mm256_shuffle_ps(one.low, other.low, 0x44),
          _mm256_shuffle_ps(one.high, other.high, 0x44)};
}
inline Floats high_pairs(Floats one, Floats other) {
  return {_mm256_shuffle_ps(one.low, other.low, 0xEE),
          _mm256_shuffle_ps(one.high, other.high, 0xEE)};
}
inline Floats even_quarters(Floats one, Floats other) {
  return {_mm256_permute2f128_ps(one.low, one.high, 0x20),
          _mm256_permute2f128_ps(other.low, other.high, 0x20)};
}
inline Floats odd_quarters(Floats one, Floats other) {
  return {_mm256_permute2f128_ps(one.low, one.high, 0x31),
          _mm256_permute2f128_ps(other.low, other.high, 0x31)};
}

inline Floats load(const bf16* from) {
  const auto* eights = reinterpret_cast<const __m128i*>(from);
  return as_floats(shift_left({_mm256_cvtepu16_epi32(_mm_loadu_si128(eights)),
                               _mm256_cvtepu16_epi32(_mm_loadu_si128(eights + 1))},
                              16));
}
// The lanes in the mask are the first ones, here and below.
inline Floats load(const bf16* from, Mask mask) {
  if (mask == 0xFFFF) return load(from);
  alignas(32) bf16 some[16] = {};
  if (mask == 0xFF)
    memcpy(some, from, 8 * sizeof(bf16));
  else
    memcpy(some, from, _mm_popcnt_u32(mask) * sizeof(bf16));
  return load(some);
}

// The upper halves of the words are the rounded numbers; the lower halves are undefined.
inline Words rounded_up(Floats values) {
  const Words bits = as_words(values);
  // Add half of the last kept digit, minus one if that digit is even; a carry moves up.
  const Words last = shift_right(bits, 16) & broadcast_word(1);
  const Words up = add_words(bits, add_words(last, broadcast_word(0x7FFF)));
  // NaN stays NaN: it becomes quiet, and no carry changes it to something else.
  const Floats is_nan{_mm256_cmp_ps(values.low, values.low, _CMP_UNORD_Q),
                      _mm256_cmp_ps(values.high, values.high, _CMP_UNORD_Q)};
  const Words quiet = bits | broadcast_word(0x400000);
  return as_words(select(is_nan, as_floats(quiet), as_floats(up)));
}
inline __m256i narrowed(Floats values) { return low_halves(shift_right(rounded_up(values), 16)); }
inline void store(bf16* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(values));
}
inline void store(bf16* to, Floats values, Mask mask) {
  if (mask == 0xFFFF) return store(to, values);
  alignas(32) bf16 some[16];
  store(some, values);
  if (mask == 0xFF)
    memcpy(to, some, 8 * sizeof(bf16));
  else
    memcpy(to, some, _mm_popcnt_u32(mask) * sizeof(bf16));
}

// Pairs of neighbouring numbers, as float32.
struct NibblePairs {
  Floats low, high;
};
inline Floats low_of(NibblePairs pairs) { return pairs.low; }
inline Floats high_of(NibblePairs pairs) { return pairs.high; }

class Nibbles {
 public:
  NibblePairs pairs(Words words, int shift) const {
    const Words bits = broadcast_word(15);
    return {to_floats(shift_right(words, shift) & bits),
            to_floats(shift_right(words, 16 + shift) & bits)};
  }
};

}  // namespace disagg
