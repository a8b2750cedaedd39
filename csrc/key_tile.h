// Packs the keys and values of a tile of positions in the layout of a weight, and computes scores.
#pragma once

#include "product.h"
#include "vectors.h"

namespace disagg {

constexpr int KEY_TILE = PANEL;  // positions
constexpr int KEY_PAIRS = KEY_TILE / 2;

// Transposes 16 rows of 16 words.
inline void turn(Floats (&rows)[LANES]) {
  Floats other[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i += 2) {
    other[i] = unpack_low(rows[i], rows[i + 1]);
    other[i + 1] = unpack_high(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    rows[i] = low_pairs(other[i], other[i + 2]);
    rows[i + 1] = high_pairs(other[i], other[i + 2]);
    rows[i + 2] = low_pairs(other[i + 1], other[i + 3]);
    rows[i + 3] = high_pairs(other[i + 1], other[i + 3]);
  }
  // Now a quarter of rows[4 i + j] has word 4 q + j of rows 4 i to 4 i + 3, in quarter q.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Floats low = even_quarters(rows[j], rows[4 + j]);
    const Floats high = odd_quarters(rows[j], rows[4 + j]);
    const Floats later_low = even_quarters(rows[8 + j], rows[12 + j]);
    const Floats later_high = odd_quarters(rows[8 + j], rows[12 + j]);
    other[j] = even_quarters(low, later_low);
    other[8 + j] = odd_quarters(low, later_low);
    other[4 + j] = even_quarters(high, later_high);
    other[12 + j] = odd_quarters(high, later_high);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) rows[i] = other[i];
}

// The largest number of each of 16 rows.
inline Floats row_maxima(const float (*rows)[KEY_TILE]) {
  Floats some[LANES];
#pragma GCC unroll 16
  for (int r = 0; r < LANES; ++r) {
    auto part = [&](int v) { return load(rows[r] + v * LANES); };
    some[r] = larger(larger(part(0), part(1)), larger(part(2), part(3)));
  }
  // Quarter q of some[4 i] has, for each of rows 4 i to 4 i + 3, the largest number of quarter q.
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    auto pair = [&](int r) {
      return larger(unpack_low(some[r], some[r + 1]), unpack_high(some[r], some[r + 1]));
    };
    const Floats upper = pair(i), lower = pair(i + 2);
    some[i] = larger(low_pairs(upper, lower), high_pairs(upper, lower));
  }
  auto quarters = [](Floats left, Floats right) {
    return larger(even_quarters(left, right), odd_quarters(left, right));
  };
  return quarters(quarters(some[0], some[4]), quarters(some[8], some[12]));
}

// Keys, or zeros where `keys[i]` is null, as `tile` reads a panel of a weight.
inline void pack_keys(const bf16* const* keys, int head_dim, uint32_t* out) {
  const int num_pairs = head_dim / 2;
  for (int first = 0; first < KEY_TILE; first += LANES) {
    for (int pair = 0; pair < num_pairs; pair += LANES) {
      const Mask mask = first_lanes(num_pairs - pair);
      Floats rows[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        const bf16* key = keys[first + i];
        rows[i] = as_floats(load_words(key + 2 * pair, key == nullptr ? 0 : mask));
      }
      turn(rows);
      const int count = num_pairs - pair < LANES ? num_pairs - pair : LANES;
      for (int i = 0; i < count; ++i)
        store_words(out + int64_t(pair + i) * KEY_TILE + first, as_words(rows[i]));
    }
  }
}

inline void pack_values(const bf16* const* values, int head_dim, uint32_t* out) {
  auto words = [](const bf16* value, int d) {
    return value == nullptr ? Words{} : load_halves(value + d);
  };
  for (int pair = 0; pair < KEY_PAIRS; ++pair)
    for (int d = 0; d < head_dim; d += LANES) {
      const Words first = words(values[2 * pair], d), second = words(values[2 * pair + 1], d);
      const int64_t row = int64_t(d / PANEL) * KEY_PAIRS + pair;
      store_words(out + row * PANEL + d % PANEL, first | shift_left(second, 16));
    }
}

}  // namespace disagg
