// Products of a few rows with an 8-bit weight: int8 numbers in panels of 64 columns, in which the
// numbers of one k are contiguous. There is a scale for each column, or for each group of numbers of
// a column. The twin is disagg/kernels/cpu/narrow_linear.py. A result does not depend on the other rows of
// `x`.
#pragma once

#include "product.h"
#include "vectors.h"

namespace disagg {

constexpr int STRIP = 512;  // numbers of each row that are multiplied at a time

// Some numbers of each row in float32.
#ifdef __AVX512BF16__

template <int num_rows>
struct WideRows {
  alignas(64) float numbers[num_rows * STRIP];
  static constexpr int64_t stride = STRIP;

  WideRows(const Activation* x, int64_t length, int count) {
    for (int r = 0; r < num_rows; ++r) copy_row(x + r * length, count, numbers + r * STRIP);
  }
};

#else

template <int>
struct WideRows {
  const float* numbers;
  int64_t stride;

  WideRows(const Activation* x, int64_t length, int) : numbers(x), stride(length) {}
};

#endif

inline Floats widened(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return to_floats(from_signed_bytes(bytes));
}

// The PANEL scales of a group in a panel.
inline const bf16* group_scales(const Matrix& matrix, int64_t panel, int group) {
  return matrix.scales + (panel * matrix.num_groups() + group) * PANEL;
}

// Sums of `num_rows` rows and `num_vectors` * 16 columns from column `offset` of a panel on, which are
// passed to `take(row, vector, sums)`. They include the scales of groups; `finished` multiplies by the
// scales of whole rows.
template <int num_rows, int num_vectors, class Take>
inline void int8_tile(const Matrix& matrix, int panel, int offset, const Activation* x,
                      Take&& take) {
  const int num_in = matrix.num_in;
  const int group_size = matrix.group_size == 0 ? num_in : matrix.group_size;
  const int8_t* columns = matrix.numbers + int64_t(panel) * num_in * PANEL + offset;
  alignas(64) float totals[num_rows][num_vectors][LANES] = {};
  for (int begin = 0, group = 0; begin < num_in; ++group) {
    const int group_end = num_in - begin < group_size ? num_in : begin + group_size;
    Floats sums[num_rows][num_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < num_vectors; ++v) sums[r][v] = zeros();
    while (begin < group_end) {
      const int left = group_end - begin, size = left < STRIP ? left : STRIP;
      const WideRows<num_rows> rows(x + begin, num_in, size);
      for (int k = 0; k < size; ++k, columns += PANEL) {
        _mm_prefetch(reinterpret_cast<const char*>(columns) + PREFETCHED, _MM_HINT_T0);
        Floats numbers[num_vectors];
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; ++v) numbers[v] = widened(columns + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r) {
          const Floats some = broadcast(rows.numbers[r * rows.stride + k]);
#pragma GCC unroll 4
          for (int v = 0; v < num_vectors; ++v)
            sums[r][v] = fma(numbers[v], some, sums[r][v]);
        }
      }
      begin += size;
    }
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) {
      Floats scale = broadcast(1.0f);
      if (matrix.group_size != 0)
        scale = load(group_scales(matrix, panel, group) + offset + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < num_rows; ++r) {
        const Floats total = load(totals[r][v]);
        store(totals[r][v], fma(sums[r][v], scale, total));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) take(r, v, load(totals[r][v]));
}

// As `product`, for an 8-bit weight.
template <int num_vectors, class Take>
inline void int8_product(const Matrix& matrix, int panel, int part, const Activation* x,
                         int num_rows, Take&& take) {
  const int offset = part * num_vectors * LANES;
  in_tiles(num_rows, [&](int, int begin, auto size) {
    constexpr int AT_ONCE = vectors_at_once(size(), num_vectors);
    for (int column = offset; column < offset + num_vectors * LANES; column += AT_ONCE * LANES)
      int8_tile<size(), AT_ONCE>(matrix, panel, column, x + int64_t(begin) * matrix.num_in,
                                 [&](int r, int v, Floats sums) {
                                   take(begin + r, panel * PANEL + column + v * LANES, sums);
                                 });
  });
}

// One column of the weight, which is a row in the checkpoint: [num_in].
inline void int8_row(const Matrix& matrix, int64_t row, bf16* out) {
  const int64_t panel = row / PANEL;
  const int column = row % PANEL;
  const int8_t* from = matrix.numbers + panel * matrix.num_in * PANEL + column;
  alignas(64) float values[LANES];
  for (int i = 0; i < matrix.num_in; i += LANES) {
    const int left = matrix.num_in - i, count = left < LANES ? left : LANES;
    for (int k = 0; k < count; ++k) {
      const bf16 scale = matrix.group_size == 0
                             ? matrix.scales[row]
                             : group_scales(matrix, panel, (i + k) / matrix.group_size)[column];
      values[k] = from[int64_t(i + k) * PANEL] * wide_of(scale);
    }
    store(out + i, load(values), first_lanes(count));
  }
}

}  // namespace disagg
