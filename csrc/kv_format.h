// Reads and writes keys and values in the layout of `disagg/kernels/kv_pages.py`. A page has the keys
// or values of one head and one layer in one block. In formats with scales it ends with a float32
// scale for each vector. A block has the pages of its first head in all layers, then those of the
// second head. Numbers are rounded as in `quantize` of disagg/kernels/reference.py.
#pragma once

#include "vectors.h"

namespace disagg {

enum Format : int32_t { BFLOAT16 = 0, INT8 = 1, INT4 = 2, FP8 = 3 };
enum Half : int32_t { KEYS = 0, VALUES = 1 };

constexpr float SMALLEST_PEAK = 1e-30f;  // so that a vector of zeros has a scale
constexpr int INT4_STEP = 16;            // an int4 is the upper half of an int8
constexpr int INT4_TOP = 7;
constexpr int E4M3_SHIFT = 20;               // distance from its last bit to that of a float32
constexpr int E4M3_EXPONENT = (127 - 7) << 23;  // difference of the exponents' biases
constexpr float E4M3_SMALLEST = 1.0f / 512;

inline Words bytes_of(const uint8_t* from) {
  return from_signed_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline Floats from_int8(const uint8_t* from) { return to_floats(bytes_of(from)); }

// Two neighbours share a byte, the first in its lower half.
inline Floats from_int4(const uint8_t* from) {
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m256i twice = _mm256_cvtepu8_epi16(pairs);
  const __m256i both = _mm256_or_si256(_mm256_slli_epi16(twice, 4), _mm256_slli_epi16(twice, 8));
  const __m256i upper = _mm256_and_si256(both, _mm256_set1_epi16(static_cast<int16_t>(0xF0F0)));
  return to_floats(from_signed_bytes(_mm256_castsi256_si128(upper)));
}

inline Floats from_fp8(const uint8_t* from) {
  const Words bits = bytes_of(from);
  const Words size = bits & broadcast_word(0x7F);
  const Words normal = add_words(shift_left(size, E4M3_SHIFT), broadcast_word(E4M3_EXPONENT));
  const Floats small = to_floats(size) * broadcast(E4M3_SMALLEST);
  const Words sign = bits & broadcast_word(INT32_MIN);
  const Words value = select(less(size, broadcast_word(8)), as_words(small), normal);
  return as_floats(value | sign);
}

// Rounds values up to 448 to the nearest e4m3 numbers, half to even.
inline __m128i to_fp8(Floats values) {
  const Words bits = as_words(values);
  const Words size = bits & broadcast_word(INT32_MAX);
  const Words last = shift_right(size, E4M3_SHIFT) & broadcast_word(1);
  const Words half = broadcast_word((1 << (E4M3_SHIFT - 1)) - 1);
  const Words moved = subtract_words(size, broadcast_word(E4M3_EXPONENT));
  const Words normal = shift_right(add_words(add_words(moved, half), last), E4M3_SHIFT);
  const Floats steps = as_floats(size) * broadcast(1.0f / E4M3_SMALLEST);
  const Words code = select(less(steps, broadcast(8.0f)), nearest(steps), normal);
  const Words sign = shift_right(bits, 24) & broadcast_word(0x80);
  return low_bytes(code | sign);
}

struct KVPages {
  uint8_t* base;
  int64_t page_nbytes;
  int64_t scales_offset;  // in a page; 0: no scales
  int32_t num_layers;
  int32_t num_vectors;  // of a token in each layer and head: a key and a value, or one for both
  int32_t num_kv_heads;
  int32_t block_size;
  int32_t format;

  uint8_t* page(int64_t block, int layer, Half half, int kv_head) const {
    const int64_t number = (block * num_kv_heads + kv_head) * num_layers + layer;
    return base + (number * num_vectors + (half < num_vectors ? half : 0)) * page_nbytes;
  }

  int64_t vector_nbytes(int head_dim) const {
    return format == BFLOAT16 ? 2 * head_dim : format == INT4 ? head_dim / 2 : head_dim;
  }

  // Calls work(page, offset in it, position, count) for runs of up to `most` positions of one block.
  template <class Work>
  void for_runs(const int32_t* blocks, int layer, Half half, int kv_head, int begin, int end,
                int most, Work&& work) const {
    for (int position = begin; position < end;) {
      const int offset = position % block_size;
      int count = block_size - offset < most ? block_size - offset : most;
      if (count > end - position) count = end - position;
      work(page(blocks[position / block_size], layer, half, kv_head), offset, position, count);
      position += count;
    }
  }

  // `count` vectors as bfloat16, without their scales: in the cache, or converted in `scratch`.
  const bf16* widened(const uint8_t* page, int offset, int count, int head_dim,
                      bf16* scratch) const {
    const uint8_t* from = page + offset * vector_nbytes(head_dim);
    if (format == BFLOAT16) return reinterpret_cast<const bf16*>(from);
    for (int i = 0; i < count * head_dim; i += LANES)
      store(scratch + i, format == INT8   ? from_int8(from + i)
                         : format == INT4 ? from_int4(from + i / 2)
                                          : from_fp8(from + i));
    return scratch;
  }

  const float* scales(const uint8_t* page, int offset) const {
    if (scales_offset == 0) return nullptr;
    return reinterpret_cast<const float*>(page + scales_offset) + offset;
  }

  // Stores the vector of a token that is at `offset` in its block.
  void write(uint8_t* page, int offset, int head_dim, const bf16* vector) const {
    uint8_t* to = page + offset * vector_nbytes(head_dim);
    if (format == BFLOAT16) {
      memcpy(to, vector, sizeof(bf16) * head_dim);
      return;
    }
    const float scale = scale_of(vector, head_dim);
    reinterpret_cast<float*>(page + scales_offset)[offset] = scale;
    for (int d = 0; d < head_dim; d += LANES) {
      const Floats scaled = load(vector + d) / broadcast(scale);
      if (format == INT4)
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + d / 2), to_int4(scaled));
      else if (format == INT8)
        store_bytes(to + d, low_bytes(nearest(scaled)));
      else
        store_bytes(to + d, to_fp8(scaled));
    }
  }

 private:
  static void store_bytes(uint8_t* to, __m128i bytes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }

  // The value of a stored number of 1. The int4 range has one step more below 0 than above 0, so the
  // value with the largest magnitude becomes -128, and the scale has the sign.
  float scale_of(const bf16* vector, int head_dim) const {
    Floats sizes = zeros(), least = zeros();
    for (int d = 0; d < head_dim; d += LANES) {
      const Floats some = load(vector + d);
      sizes = larger(sizes, absolute(some));
      least = smaller(least, some);
    }
    const float largest = largest_of(sizes);
    const float peak = largest > SMALLEST_PEAK ? largest : SMALLEST_PEAK;
    if (format != INT4) return peak / (format == INT8 ? 127.0f : 448.0f);
    return (least_of(least) <= -peak ? -peak : peak) / -128.0f;
  }

  static __m128i to_int4(Floats scaled) {
    const Floats steps = scaled / broadcast(INT4_STEP);
    const Words whole = smaller_words(nearest(steps), broadcast_word(INT4_TOP));
    // Two neighbours, in 16 bits, become one byte.
    const __m128i pairs = _mm_and_si128(low_bytes(whole), _mm_set1_epi8(15));
    const __m128i both = _mm_or_si128(pairs, _mm_srli_epi16(pairs, 4));
    return _mm_packus_epi16(_mm_and_si128(both, _mm_set1_epi16(255)), _mm_setzero_si128());
  }
};

}  // namespace disagg
