// Products with AMX. A tile register has 16 rows of 64 bytes. One tile product multiplies 16 rows of
// `x` with 16 columns of a weight, over 32 numbers of each. A result does not depend on other rows.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"
#include "rows.h"

namespace disagg {

#ifndef __AMX_BF16__

constexpr bool HAS_TILES = false;

struct Tiles {
  Tiles() {}
};
inline bool may_use_tiles() { return true; }
inline bool reads_panels(int width) { return width == PANEL; }

#else

constexpr bool HAS_TILES = true;
constexpr int TILE_PAIRS = TILE_DEPTH / 2;

// While an object of this type lives, the thread's tiles are configured for these products; torch
// uses another configuration.
class Tiles {
 public:
  Tiles() {
    const Configuration all;
    // The compiler assumes that only the first bytes are read, and may omit writing the others.
    asm volatile("" ::"r"(&all) : "memory");
    _tile_loadconfig(&all);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct alignas(64) Configuration {  // of LDTILECFG, in Intel's manual
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

// Linux lets a process use tiles only after a request.
inline bool may_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

inline bool reads_panels(int width) { return width > 0 && width % LANES == 0; }

// Rows of bfloat16, `stride` bytes apart, which are read in whole tiles. If their length is no
// multiple of TILE_DEPTH, the rest is in `tail`, [rows, TILE_DEPTH], padded with zeros.
struct TileRows {
  const bf16* x;
  int64_t stride;
  int32_t length;
  const bf16* tail;

  TilePlace place(int64_t row, int k) const {
    if (k + TILE_DEPTH <= length) return {x + row * (stride / int64_t(sizeof(bf16))) + k, stride};
    return {tail + row * TILE_DEPTH, TILE_DEPTH * sizeof(bf16)};
  }
};

// `num_vectors` * 16 columns, as pairs of one k and the next. Pairs are `stride` bytes apart.
template <int num_vectors>
struct TileColumns {
  const uint32_t* of[num_vectors];
  int64_t stride;
  bool is_far;  // in memory and not in a cache, so that it is prefetched

  const uint32_t* at(int vector, int k) const { return of[vector] + k / 2 * (stride / 4); }
  void bring_closer(int k) const {
    if (!is_far) return;
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; ++v) {
      const char* ahead = reinterpret_cast<const char*>(at(v, k)) + PREFETCHED;
#pragma GCC unroll 16
      for (int i = 0; i < TILE_PAIRS; ++i) _mm_prefetch(ahead + i * stride, _MM_HINT_T0);
    }
  }
};

// Sums of 16 rows and up to 64 columns. The rows of `out` are `stride` bytes apart. With `adds`, the
// products are added to `out`.
template <int num_vectors, bool adds = false>
inline void tile_product(const TileRows& rows, const TileColumns<num_vectors>& columns, float* out,
                         int64_t stride = PANEL * sizeof(float)) {
  asm volatile("" ::: "memory");  // the compiler does not know that tiles read memory
  if constexpr (adds) {
    _tile_loadd(0, out, stride);
    if constexpr (num_vectors > 1) _tile_loadd(1, out + LANES, stride);
    if constexpr (num_vectors > 2) _tile_loadd(2, out + 2 * LANES, stride);
    if constexpr (num_vectors > 3) _tile_loadd(3, out + 3 * LANES, stride);
  } else {
    _tile_zero(0);
    if constexpr (num_vectors > 1) _tile_zero(1);
    if constexpr (num_vectors > 2) _tile_zero(2);
    if constexpr (num_vectors > 3) _tile_zero(3);
  }
  for (int k = 0; k < rows.length; k += TILE_DEPTH) {
    const TilePlace some = rows.place(0, k);
    _tile_loadd(4, some.at, some.stride);
    _tile_loadd(5, columns.at(0, k), columns.stride);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (num_vectors > 1) {
      _tile_loadd(6, columns.at(1, k), columns.stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (num_vectors > 2) {
      _tile_loadd(7, columns.at(2, k), columns.stride);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (num_vectors > 3) {
      _tile_loadd(5, columns.at(3, k), columns.stride);
      _tile_dpbf16ps(3, 4, 5);
    }
    columns.bring_closer(k);
  }
  _tile_stored(0, out, stride);
  if constexpr (num_vectors > 1) _tile_stored(1, out + LANES, stride);
  if constexpr (num_vectors > 2) _tile_stored(2, out + 2 * LANES, stride);
  if constexpr (num_vectors > 3) _tile_stored(3, out + 3 * LANES, stride);
}

// Sums of the 32 rows from `row` on and 32 columns, over the numbers `begin` to `end` of each. Every
// tile is read once for two products. The rows of `out` are `stride` bytes apart. Unless `begin` is
// 0, the products are added to `out`.
template <class Rows>
inline void tile_product_32(const Rows& rows, int64_t row, const TileColumns<2>& columns, int begin,
                            int end, float* out, int64_t stride) {
  float* lower = out + TILE_ROWS * (stride / int64_t(sizeof(float)));
  asm volatile("" ::: "memory");
  if (begin == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, stride);
    _tile_loadd(1, out + LANES, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + LANES, stride);
  }
  for (int k = begin; k < end; k += TILE_DEPTH) {
    const TilePlace some = rows.place(row, k), others = rows.place(row + TILE_ROWS, k);
    _tile_loadd(4, some.at, some.stride);
    _tile_loadd(6, columns.at(0, k), columns.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, columns.at(1, k), columns.stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, others.at, others.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    columns.bring_closer(k);
  }
  _tile_stored(0, out, stride);
  _tile_stored(1, out + LANES, stride);
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + LANES, stride);
}

// The ends of up to 32 rows whose length is no multiple of TILE_DEPTH.
inline void copy_tail(const bf16* x, int num_rows, int length, bf16* tail) {
  const int begin = length / TILE_DEPTH * TILE_DEPTH;
  if (begin == length) return;
  memset(tail, 0, sizeof(bf16) * 2 * TILE_ROWS * TILE_DEPTH);
  for (int r = 0; r < num_rows; ++r)
    memcpy(tail + r * TILE_DEPTH, x + int64_t(r) * length + begin, sizeof(bf16) * (length - begin));
}

template <int num_vectors>
inline TileColumns<num_vectors> columns_of(const Matrix& matrix, int first_column) {
  TileColumns<num_vectors> columns{{}, matrix.panel_width * int64_t(sizeof(uint32_t)), true};
  for (int v = 0; v < num_vectors; ++v) columns.of[v] = matrix.column(first_column + v * LANES);
  return columns;
}

// As `product` of product.h, for panels of any width. It reads rows of `x` up to a multiple of
// TILE_ROWS; the contents of rows beyond `num_rows` do not matter.
template <int num_vectors, class Take>
inline void tiles_product(const Matrix& matrix, int panel, int part, const bf16* x, int num_rows,
                          Take&& take) {
  const int first_column = panel * PANEL + part * num_vectors * LANES, num_in = matrix.num_in;
  alignas(64) bf16 tail[2 * TILE_ROWS * TILE_DEPTH];
  alignas(64) float out[2 * TILE_ROWS * PANEL];
  for (int begin = 0; begin < num_rows; begin += 2 * TILE_ROWS) {
    const int left = num_rows - begin, count = left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS;
    const bf16* some = x + int64_t(begin) * num_in;
    copy_tail(some, count, num_in, tail);
    const TileRows rows{some, num_in * int64_t(sizeof(bf16)), num_in, tail};
    if (num_vectors == 4 && count > TILE_ROWS) {
      for (int v = 0; v < 4; v += 2)
        tile_product_32(rows, 0, columns_of<2>(matrix, first_column + v * LANES), 0, num_in,
                        out + v * LANES, PANEL * sizeof(float));
    } else {
      const auto columns = columns_of<num_vectors>(matrix, first_column);
      tile_product(rows, columns, out);
      const TileRows lower{some + int64_t(TILE_ROWS) * num_in, rows.stride, num_in,
                           tail + TILE_ROWS * TILE_DEPTH};
      if (count > TILE_ROWS) tile_product(lower, columns, out + TILE_ROWS * PANEL);
    }
    for (int r = 0; r < count; ++r)
      for (int v = 0; v < num_vectors; ++v)
        take(begin + r, first_column + v * LANES, load(out + r * PANEL + v * LANES));
  }
}

#endif

}  // namespace disagg
