// Products with a weight of any kind, and reading its rows.
#pragma once

#include "amx.h"
#include "buffer.h"
#include "int4.h"
#include "int8.h"
#include "product.h"
#include "widened.h"

namespace disagg {

template <int num_vectors, class Take>
inline void any_product(const Matrix& matrix, int panel, int part, const bf16* x, int num_rows,
                        const uint32_t* next, Take&& take) {
  if (matrix.nibbles != nullptr)
    int4_product<num_vectors>(matrix, panel, part, x, num_rows, take);
  else if (matrix.numbers != nullptr)
    int8_product<num_vectors>(matrix, panel, part, x, num_rows, take);
  else
#ifdef __AMX_BF16__
    tiles_product<num_vectors>(matrix, panel, part, x, num_rows, take);
#else
    product<num_vectors>(matrix, panel, part, x, num_rows, next, take);
#endif
}

// A row of the checkpoint of a weight of 8 or 4 bits: [num_in].
inline void any_row(const Matrix& matrix, int64_t row, bf16* out) {
  if (matrix.nibbles != nullptr)
    int4_row(matrix, row, out);
  else
    int8_row(matrix, row, out);
}

constexpr int FEW_ROWS = 16;  // with more rows, AMX multiplies with numbers that were widened before

// Some panels of a product with a weight of 8 or 4 bits, or without AMX also of 16 bits, for rows of
// prompts; out is [num_rows, num_out]. With more than FEW_ROWS rows, it reads rows of `x` up to a
// multiple of TILE_ROWS.
inline void narrow_rows(const Matrix& matrix, const bf16* x, int num_rows, int first_panel,
                        int end_panel, bf16* out) {
  auto take = [&](int row, int column, Floats sums) {
    store(out + int64_t(row) * matrix.num_out + column, finished(matrix, column, sums),
          first_lanes(matrix.num_out - column));
  };
#ifdef __AMX_BF16__
  Buffer<uint32_t> wide;
  const int64_t size = int64_t(matrix.num_filled_pairs()) * PANEL;
  if (num_rows > FEW_ROWS && wide.hold(size)) {
    const Tiles tiles;
    for (int panel = first_panel; panel < end_panel; ++panel)
      widened_product(matrix, panel, x, num_rows, wide.get(), take);
    return;
  }
#endif
  for (int panel = first_panel; panel < end_panel; ++panel)
    if (matrix.nibbles != nullptr)
      int4_product<4>(matrix, panel, 0, x, num_rows, take);
    else if (matrix.numbers != nullptr)
      int8_product<4>(matrix, panel, 0, x, num_rows, take);
    else
      product<4>(matrix, panel, 0, x, num_rows, matrix.panel(panel), take);
}

}  // namespace disagg
