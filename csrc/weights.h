// Products with a weight of any kind, and reading its rows.
#pragma once

#include "amx.h"
#include "buffer.h"
#include "int4.h"
#include "int8.h"
#include "model.h"
#include "product.h"
#include "widened.h"

namespace disagg {

template <int num_vectors, class Take>
inline void any_product(const Matrix& matrix, int panel, int part, const Activation* x,
                        int num_rows, [[maybe_unused]] const uint32_t* next, Take&& take) {
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

constexpr int FEW_ROWS = 16;      // with more rows, AMX multiplies with numbers that were widened before
constexpr int ROWS_AT_ONCE = 96;  // few enough to stay in a cache while they are multiplied

// Rows of bfloat16 as products read them; `memory` is used where they must be widened. Returns null if
// there is not enough memory.
inline const Activation* activations(const bf16* x, int64_t size, Buffer<Activation>& memory) {
  if constexpr (HAS_BF16) return reinterpret_cast<const Activation*>(x);
  if (!memory.hold(size)) return nullptr;
  copy_row(x, size, memory.get());
  return memory.get();
}

// The panels `first_panel` to `end_panel` of x W^T + b, for products that are called one by one; out is
// [num_rows, num_out]. With AMX the weight has 8 or 4 bits, and if there are more than FEW_ROWS rows,
// rows of `x` up to a multiple of TILE_ROWS are read.
inline Status narrow_rows(const Matrix& matrix, const bf16* x, int num_rows, int first_panel,
                          int end_panel, bf16* out) {
#ifdef __AMX_BF16__
  if (num_rows > FEW_ROWS) {
    Buffer<uint32_t> wide;
    if (!wide.hold(int64_t(matrix.num_filled_pairs()) * PANEL)) return NO_MEMORY;
    const Tiles tiles;
    for (int panel = first_panel; panel < end_panel; ++panel)
      widened_product(matrix, panel, x, num_rows, wide.get(), [&](int row, int column, Floats sums) {
        store_finished(matrix, row, column, sums, out);
      });
    return DONE;
  }
#endif
  Buffer<Activation> memory;
  for (int begin = 0; begin < num_rows; begin += ROWS_AT_ONCE) {
    const int count = num_rows - begin < ROWS_AT_ONCE ? num_rows - begin : ROWS_AT_ONCE;
    const bf16* from = x + int64_t(begin) * matrix.num_in;
    const Activation* rows = activations(from, int64_t(count) * matrix.num_in, memory);
    if (rows == nullptr) return NO_MEMORY;
    for (int panel = first_panel; panel < end_panel; ++panel)
      any_product<4>(matrix, panel, 0, rows, count, matrix.panel(panel),
                     [&](int row, int column, Floats sums) {
                       store_finished(matrix, begin + row, column, sums, out);
                     });
  }
  return DONE;
}

}  // namespace disagg
