// Vectors of 16 numbers, float32 or 32-bit words: a register with AVX-512, two of 8 with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace disagg {

constexpr int LANES = 16;

using Mask = uint16_t;

// `OF_WIDTH(name)` is the intrinsic of that name for a register's width. `by_parts(make)` is the vector
// whose registers are `make(first lane)`, `on_parts(work, values)` calls `work(register, first lane)`,
// and `each(make, vectors...)` makes a register from those of each vector.
#ifdef __AVX512F__

#define OF_WIDTH(name) _mm512_##name

using Register = __m512;
using WordsRegister = __m512i;
using HalfRegister = __m256i;
using Floats = Register;
using Words = WordsRegister;  // of 32 bits
using Lanes = __mmask16;      // of a comparison

constexpr bool HAS_32_REGISTERS = true;

template <class Make>
inline auto by_parts(Make&& make) {
  return make(0);
}
template <class Work, class Vector>
inline void on_parts(Work&& work, Vector values) {
  work(values, 0);
}
template <class Make, class... Vectors>
inline auto each(Make&& make, Vectors... vectors) {
  return make(vectors...);
}

#else

#define OF_WIDTH(name) _mm256_##name

template <class Part>
struct Two {
  Part low, high;
};

// As __m256 and __m256i, but for attributes that a template ignores.
using Register [[gnu::vector_size(32)]] = float;
using WordsRegister [[gnu::vector_size(32)]] = long long;
using HalfRegister = __m128i;
using Floats = Two<Register>;
using Words = Two<WordsRegister>;
using Lanes = Words;  // all bits of the lanes for which a comparison is true

constexpr bool HAS_32_REGISTERS = false;

template <class Make>
inline auto by_parts(Make&& make) -> Two<decltype(make(0))> {
  return {make(0), make(LANES / 2)};
}
template <class Work, class Vector>
inline void on_parts(Work&& work, Vector values) {
  work(values.low, 0);
  work(values.high, LANES / 2);
}
template <class Make, class... Vectors>
inline auto each(Make&& make, Vectors... vectors) -> Two<decltype(make(vectors.low...))> {
  return {make(vectors.low...), make(vectors.high...)};
}

template <class Part>
inline Two<Part> operator+(Two<Part> one, Two<Part> other) {
  return {one.low + other.low, one.high + other.high};
}
template <class Part>
inline Two<Part> operator-(Two<Part> one, Two<Part> other) {
  return {one.low - other.low, one.high - other.high};
}
template <class Part>
inline Two<Part> operator*(Two<Part> one, Two<Part> other) {
  return {one.low * other.low, one.high * other.high};
}
template <class Part>
inline Two<Part> operator/(Two<Part> one, Two<Part> other) {
  return {one.low / other.low, one.high / other.high};
}
template <class Part>
inline Two<Part> operator&(Two<Part> one, Two<Part> other) {
  return {one.low & other.low, one.high & other.high};
}
template <class Part>
inline Two<Part> operator|(Two<Part> one, Two<Part> other) {
  return {one.low | other.low, one.high | other.high};
}

#endif

// The intrinsic `name` of both widths, applied to each register.
#define EACH(name, ...) \
  each([](auto... parts) { return OF_WIDTH(name)(parts...); }, __VA_ARGS__)

inline Floats zeros() { return Floats{}; }
inline Floats broadcast(float value) {
  return by_parts([=](int) { return OF_WIDTH(set1_ps)(value); });
}
inline Words broadcast_word(uint32_t word) {
  return by_parts([=](int) { return OF_WIDTH(set1_epi32)(static_cast<int>(word)); });
}
inline Floats as_floats(Words bits) {
  return each([](WordsRegister part) { return Register(part); }, bits);
}
inline Words as_words(Floats bits) {
  return each([](Register part) { return WordsRegister(part); }, bits);
}
inline Floats to_floats(Words numbers) { return EACH(cvtepi32_ps, numbers); }
inline Words nearest(Floats values) { return EACH(cvtps_epi32, values); }

inline Words shift_left(Words words, int count) {
  return each([=](auto part) { return OF_WIDTH(slli_epi32)(part, count); }, words);
}
inline Words shift_right(Words words, int count) {
  return each([=](auto part) { return OF_WIDTH(srli_epi32)(part, count); }, words);
}
inline Words add_words(Words one, Words other) { return EACH(add_epi32, one, other); }
inline Words subtract_words(Words one, Words other) { return EACH(sub_epi32, one, other); }
inline Words smaller_words(Words one, Words other) { return EACH(min_epi32, one, other); }

// one * other + summand, rounded once.
inline Floats fma(Floats one, Floats other, Floats summand) {
  return EACH(fmadd_ps, one, other, summand);
}
// Of a NaN and a number, returns the second argument.
inline Floats larger(Floats one, Floats other) { return EACH(max_ps, one, other); }
inline Floats smaller(Floats one, Floats other) { return EACH(min_ps, one, other); }
inline Floats absolute(Floats values) {
  return as_floats(as_words(values) & broadcast_word(0x7FFFFFFF));
}

// From each quarter, the first or the last two words of both, interleaved.
inline Floats unpack_low(Floats one, Floats other) { return EACH(unpacklo_ps, one, other); }
inline Floats unpack_high(Floats one, Floats other) { return EACH(unpackhi_ps, one, other); }
// From each quarter, the first or the last two words of one and then of the other.
inline Floats low_pairs(Floats one, Floats other) {
  return each([](auto left, auto right) { return OF_WIDTH(shuffle_ps)(left, right, 0x44); }, one,
              other);
}
inline Floats high_pairs(Floats one, Floats other) {
  return each([](auto left, auto right) { return OF_WIDTH(shuffle_ps)(left, right, 0xEE); }, one,
              other);
}

inline Floats load(const float* from) {
  return by_parts([=](int lane) { return OF_WIDTH(loadu_ps)(from + lane); });
}
inline void store(float* to, Floats values) {
  on_parts([=](auto part, int lane) { OF_WIDTH(storeu_ps)(to + lane, part); }, values);
}
// The first bits of a word are those of a number of bfloat16.
inline Words load_halves(const bf16* from) {
  return by_parts([=](int lane) {
    HalfRegister some;
    memcpy(&some, from + lane, sizeof some);
    return OF_WIDTH(cvtepu16_epi32)(some);
  });
}
inline Floats load(const bf16* from) { return as_floats(shift_left(load_halves(from), 16)); }

#ifdef __AVX512F__

// `values` in these lanes, and `others` in those.
inline Floats select(Lanes lanes, Floats values, Floats others) {
  return _mm512_mask_mov_ps(others, lanes, values);
}
inline Lanes lanes_of(Mask mask) { return mask; }
inline Mask mask_of(Lanes lanes) { return lanes; }
inline Lanes less(Floats one, Floats other) { return _mm512_cmp_ps_mask(one, other, _CMP_LT_OQ); }
inline Lanes less(Words one, Words other) { return _mm512_cmplt_epi32_mask(one, other); }
inline Lanes is_nan(Floats values) { return _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q); }

inline Floats load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline void store(float* to, Floats values, Mask mask) {
  _mm512_mask_storeu_ps(to, mask, values);
}

inline Words from_signed_bytes(__m128i bytes) { return _mm512_cvtepi8_epi32(bytes); }
// For words that fit into unsigned 16 bits.
inline __m256i low_halves(Words words) { return _mm512_cvtepi32_epi16(words); }
inline __m128i low_bytes(Words words) { return _mm512_cvtepi32_epi8(words); }

inline Floats to_whole(Floats values) {
  return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// The fractional parts: the numbers minus the integers below them; 0 for -infinity.
inline Floats above_whole(Floats values) {
  return _mm512_reduce_ps(values, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
// Multiplied by 2 to the power of `powers`, rounded down to integers.
inline Floats scaled(Floats values, Floats powers) { return _mm512_scalef_ps(values, powers); }

inline void add_product(Floats& acc, Floats one, Floats other) { acc = fma(one, other, acc); }

inline __m256 low_half(Floats values) { return _mm512_castps512_ps256(values); }
inline __m256 high_half(Floats values) { return _mm512_extractf32x8_ps(values, 1); }
// Quarters 0 and 2, or 1 and 3, of one and then of the other.
inline Floats even_quarters(Floats one, Floats other) {
  return _mm512_shuffle_f32x4(one, other, 0x88);
}
inline Floats odd_quarters(Floats one, Floats other) {
  return _mm512_shuffle_f32x4(one, other, 0xDD);
}

#else

inline Floats select(Lanes lanes, Floats values, Floats others) {
  auto choose = [](Register part, Register other, WordsRegister chosen) {
    return _mm256_blendv_ps(other, part, Register(chosen));
  };
  return each(choose, values, others, lanes);
}
inline Lanes lanes_of(Mask mask) {
  return by_parts([=](int lane) {
    const __m256i own = _mm256_slli_epi32(_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), lane);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), own), own);
  });
}
inline Mask mask_of(Lanes lanes) {
  const Floats bits = as_floats(lanes);
  return _mm256_movemask_ps(bits.low) | _mm256_movemask_ps(bits.high) << 8;
}
inline Lanes less(Floats one, Floats other) {
  auto compare = [](Register left, Register right) {
    return WordsRegister(_mm256_cmp_ps(left, right, _CMP_LT_OQ));
  };
  return each(compare, one, other);
}
inline Lanes less(Words one, Words other) { return EACH(cmpgt_epi32, other, one); }
inline Lanes is_nan(Floats values) {
  auto compare = [](Register part) {
    return WordsRegister(_mm256_cmp_ps(part, part, _CMP_UNORD_Q));
  };
  return each(compare, values);
}

inline Floats load(const float* from, Mask mask) {
  if (mask == 0xFFFF) return load(from);
  const Lanes lanes = lanes_of(mask);
  return {_mm256_maskload_ps(from, lanes.low), _mm256_maskload_ps(from + 8, lanes.high)};
}
inline void store(float* to, Floats values, Mask mask) {
  if (mask == 0xFFFF) return store(to, values);
  const Lanes lanes = lanes_of(mask);
  _mm256_maskstore_ps(to, lanes.low, values.low);
  _mm256_maskstore_ps(to + 8, lanes.high, values.high);
}

inline Words from_signed_bytes(__m128i bytes) {
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline __m256i low_halves(Words words) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(words.low, words.high), 0xD8);
}
inline __m128i low_bytes(Words words) {
  const __m256i halves = low_halves(words & broadcast_word(0xFF));
  return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

inline Floats to_whole(Floats values) {
  auto round = [](Register part) {
    return _mm256_round_ps(part, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  };
  return each(round, values);
}
// Larger and smaller powers of two, times any number near 1, are infinite or 0. NaN stays NaN.
inline Floats clamped(Floats powers) {
  return smaller(broadcast(250.0f), larger(broadcast(-250.0f), powers));
}
inline Floats whole_below(Floats values) {
  return each([](Register part) { return _mm256_floor_ps(part); }, values);
}
inline Floats above_whole(Floats values) {
  values = clamped(values);
  return values - whole_below(values);
}
inline Floats scaled(Floats values, Floats powers) {
  const Words whole = nearest(whole_below(clamped(powers)));
  // In two steps, because float32 cannot represent a power of two that is so small or so large.
  const Words half = each([](auto part) { return _mm256_srai_epi32(part, 1); }, whole);
  auto power = [](Words exponents) {
    return as_floats(shift_left(add_words(exponents, broadcast_word(127)), 23));
  };
  return values * power(half) * power(subtract_words(whole, half));
}

// Adds in the register of `acc`. gcc would choose others, and spill the sums of large tiles.
[[gnu::always_inline]] inline void add_product(Floats& acc, Floats one, Floats other) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.low) : "x"(one.low), "x"(other.low));
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.high) : "x"(one.high), "x"(other.high));
}

inline __m256 low_half(Floats values) { return values.low; }
inline __m256 high_half(Floats values) { return values.high; }
inline Floats even_quarters(Floats one, Floats other) {
  return {_mm256_permute2f128_ps(one.low, one.high, 0x20),
          _mm256_permute2f128_ps(other.low, other.high, 0x20)};
}
inline Floats odd_quarters(Floats one, Floats other) {
  return {_mm256_permute2f128_ps(one.low, one.high, 0x31),
          _mm256_permute2f128_ps(other.low, other.high, 0x31)};
}

#endif

inline Words select(Lanes lanes, Words values, Words others) {
  return as_words(select(lanes, as_floats(values), as_floats(others)));
}

inline Words load_words(const void* from) { return as_words(load(static_cast<const float*>(from))); }
inline Words load_words(const void* from, Mask mask) {
  return as_words(load(static_cast<const float*>(from), mask));
}
inline void store_words(void* to, Words words) { store(static_cast<float*>(to), as_floats(words)); }

inline float sum_of(Floats values) {
  const __m256 eight = low_half(values) + high_half(values);
  __m128 some = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  some = some + _mm_movehl_ps(some, some);
  return some[0] + some[1];
}
inline float largest_of(Floats values) {
  const __m256 eight = _mm256_max_ps(low_half(values), high_half(values));
  __m128 some = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  some = _mm_max_ps(some, _mm_movehl_ps(some, some));
  return _mm_cvtss_f32(_mm_max_ss(some, _mm_movehdup_ps(some)));
}
inline float least_of(Floats values) { return -largest_of(zeros() - values); }

// The first and the second numbers of pairs of bfloat16.
inline Floats low_of(Words pairs) { return as_floats(shift_left(pairs, 16)); }
inline Floats high_of(Words pairs) { return as_floats(pairs & broadcast_word(0xFFFF0000)); }

#ifdef __AVX512BF16__

// Rounded to nearest, half to even.
inline __m256i narrowed(Floats values) { return __m256i(_mm512_cvtneps_pbh(values)); }
inline Words narrowed_words(Floats values) { return _mm512_cvtepu16_epi32(narrowed(values)); }

// acc + the dot products of neighbouring pairs.
inline Floats dot_pairs(Floats acc, Words left, Words right) {
  return _mm512_dpbf16_ps(acc, __m512bh(left), __m512bh(right));
}

#else

// The upper halves of the words are the rounded numbers; the lower halves are undefined.
inline Words rounded_up(Floats values) {
  const Words bits = as_words(values);
  // Add half of the last kept digit, minus one if that digit is even; a carry moves up.
  const Words last = shift_right(bits, 16) & broadcast_word(1);
  const Words up = add_words(bits, add_words(last, broadcast_word(0x7FFF)));
  // NaN stays NaN: it becomes quiet, and no carry changes it to something else.
  return select(is_nan(values), bits | broadcast_word(0x400000), up);
}
inline Words narrowed_words(Floats values) { return shift_right(rounded_up(values), 16); }
inline __m256i narrowed(Floats values) { return low_halves(narrowed_words(values)); }

inline Floats dot_pairs(Floats acc, Words left, Words right) {
  acc = fma(low_of(left), low_of(right), acc);
  return fma(high_of(left), high_of(right), acc);
}

#endif

inline Floats rounded(Floats values) {
#ifdef __AVX512BF16__
  return as_floats(shift_left(narrowed_words(values), 16));
#else
  return high_of(rounded_up(values));
#endif
}

// The first `count` of 16 lanes: all for a larger count, none for one below 0.
inline Mask first_lanes(int count) {
  if (count >= LANES) return 0xFFFF;
  return count <= 0 ? 0 : Mask((1u << count) - 1);
}

// The lanes in the mask are the first ones, here and below.
inline Floats load(const bf16* from, Mask mask) {
#ifdef __AVX512F__
  return low_of(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)));
#else
  if (mask == 0xFFFF) return load(from);
  alignas(32) bf16 some[LANES] = {};
  if (mask == 0xFF)
    memcpy(some, from, 8 * sizeof(bf16));
  else
    memcpy(some, from, _mm_popcnt_u32(mask) * sizeof(bf16));
  return load(some);
#endif
}
inline void store(bf16* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(values));
}
// Zen CPUs take many times longer to write under a mask, so a full mask is handled separately.
inline void store(bf16* to, Floats values, Mask mask) {
  if (mask == 0xFFFF) return store(to, values);
#ifdef __AVX512F__
  _mm256_mask_storeu_epi16(to, mask, narrowed(values));
#else
  alignas(32) bf16 some[LANES];
  store(some, values);
  if (mask == 0xFF)
    memcpy(to, some, 8 * sizeof(bf16));
  else
    memcpy(to, some, _mm_popcnt_u32(mask) * sizeof(bf16));
#endif
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

inline Floats hyperbolic_tangent(Floats x) {
  const Floats one = broadcast(1.0f);
  return one - broadcast(2.0f) / (one + exponential(x + x));
}

inline Floats silu(Floats x) {
  return x / (broadcast(1.0f) + exponential(zeros() - x));
}

// How many of 1 or 4 vectors of columns are multiplied with so many rows at once, such that the sums
// stay in registers.
constexpr int vectors_at_once(int num_rows, int num_vectors) {
  const int most = HAS_32_REGISTERS || num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1;
  return num_vectors < most ? num_vectors : most;
}

// Converts the lowest 4 bits of each 16-bit word to a number, for pairs of neighbours.
#ifdef __AVX512F__

using NibblePairs = Words;  // of bfloat16

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

#else

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

#endif

}  // namespace disagg
