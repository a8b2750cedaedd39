"""Products with packed weights in Triton; the weights are widened in registers only, or not at all.

A step with few rows has too few tiles for all of a GPU's multiprocessors. Then several programs
share the columns of a tile, and a second kernel adds up their sums, always in the same order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.eight_bit_tile import (
    DTYPES,
    eight_bit_tile,
    quantize_rows,
    why_16_bits,
)
from disagg.kernels.gpu.packed_tile import TileFormat, launch_options, max_rows, packed_tile
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.packed_sizes import EIGHT_BIT_ROWS, Kind

MIN_ROWS = 16
WIDTH = 128  # rows of a weight that a program multiplies
FEW_ROWS, NARROW = 8, 64  # with at most 8 rows of `x` it is half: more programs share the bytes
BAND = 8  # tiles of rows whose programs are neighbours, so that they share data in the L2 cache
MOST_SPLITS = 16
MOST_SPLIT_ROWS = 256  # with more rows of `x` there are enough tiles
LEAST_CHUNKS = 4  # least chunks of a program, so that loads overlap with products
_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_own_chunks"])
def _packed_linear_kernel(
    x_ptr,
    x_scales_ptr,
    units_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    num_chunks,
    num_own_chunks,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BAND: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Compute one tile of x W^T, over all columns or over `num_own_chunks` chunks of them.

    Args:
        x_ptr: [num_rows, num_in].
        x_scales_ptr: [num_rows, num_groups], of x in 8 bits; None: x has floats.
        out_ptr: [num_rows, num_out]; if IS_SPLIT, float32 [num_splits, num_rows, num_out].
    """
    program, split = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.cdiv(num_out, WIDTH)
    first_tile = program // (BAND * num_tiles) * BAND
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first_tile, BAND)
    local = program % (BAND * num_tiles)
    rows = (first_tile + local % height) * ROWS + tl.arange(0, ROWS)
    columns = local // height * WIDTH + tl.arange(0, WIDTH)
    own = tl.minimum(columns, num_out - 1)  # columns beyond are computed, but not stored
    first = split * num_own_chunks
    end = tl.minimum(first + num_own_chunks, num_chunks)
    if x_scales_ptr is None:
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * num_in
        acc = packed_tile(
            x_ptrs, (rows < num_rows)[:, None], units_ptr, scales_ptr, zeros_ptr, row_scales_ptr,
            own, num_out, num_in, num_chunks, first, end, FORMAT, ROWS, WIDTH,
        )  # fmt: skip
    else:
        own_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
        num_groups = tl.cdiv(num_in, FORMAT.group) if FORMAT.group else 1
        acc = eight_bit_tile(
            x_ptr + own_rows[:, None] * num_in, x_scales_ptr + own_rows * num_groups, units_ptr,
            scales_ptr, own, num_out, num_chunks, first, end, FORMAT.group, ROWS, WIDTH,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + own).to(tl.float32)[:, None]
    if IS_SPLIT:
        out_ptr += split.to(tl.int64) * num_rows * num_out
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * num_out + columns[:, None]
    mask = (rows < num_rows)[None, :] & (columns < num_out)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_values", "num_splits"])
def _add_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_values,
    num_splits,
    num_out,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up `num_splits` partial results of `num_values` values, and the bias.

    All partial results, at most SPLITS, are loaded at once.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    splits = tl.arange(0, SPLITS)
    mask = (splits < num_splits)[:, None] & (places < num_values)[None, :]
    partial_ptrs = partial_ptr + splits.to(tl.int64)[:, None] * num_values + places[None, :]
    total = tl.sum(tl.load(partial_ptrs, mask=mask, other=0.0), axis=0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + places % num_out, mask=places < num_values, other=0.0)
        total += bias.to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=places < num_values)


def tile_sizes(num_rows: int, most: int) -> tuple[int, int]:
    """The rows of `x` (at most `most`) and the rows of the weight that a program multiplies."""
    rows = max(MIN_ROWS, min(next_power_of_2(num_rows), most))
    return rows, NARROW if num_rows <= FEW_ROWS else WIDTH


def num_splits(num_tiles: int, num_chunks: int, num_programs: int) -> int:
    """The number of programs that share the columns of a tile.

    Args:
        num_programs: number of programs that keep the device busy; a third of them read memory at
            nearly full speed.
    """
    if 3 * num_tiles >= num_programs:
        return 1
    most = min(-(-num_programs // num_tiles), MOST_SPLITS, max(1, num_chunks // LEAST_CHUNKS))
    return -(-num_chunks // -(-num_chunks // most))  # so that no program is without chunks


class PackedProduct:
    """Computes x W^T + b with a packed weight on a GPU.

    Args:
        num_programs: number of programs that keep the device busy.
        major: major number of its compute capability.
        eight_bits: kinds of numbers that it multiplies as they are.
    """

    def __init__(
        self,
        weight: PackedMatrix,
        bias: Tensor | None,
        num_programs: int,
        major: int,
        eight_bits: frozenset[Kind] = frozenset(),
    ) -> None:
        self.weight, self.bias = weight, bias
        self._in_8_bits = not why_16_bits(weight, eight_bits)
        self._num_programs = num_programs
        self._max_rows = max_rows(weight.kind, weight.group, major)
        self._format = TileFormat.of(weight.kind, weight.group)
        self._num_chunks = weight.units.shape[1] // self._format.part

    @property
    def variant(self) -> tuple[object, ...]:
        """The properties that determine, together with the number of rows, the needed programs."""
        weight = self.weight
        absent = weight.zeros is None, self.bias is None
        inputs = self._in_8_bits and bool(weight.input_scale)
        return self._format, weight.scales.dtype, *absent, *weight.shape, self._in_8_bits, inputs

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the programs for all numbers of rows of `x`, which is of `dtype`."""
        for num_rows in (1, *(1 << log for log in range(4, 9)), MOST_SPLIT_ROWS + 1):
            self(torch.zeros(num_rows, self.weight.num_in, dtype=dtype, device=self.weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply contiguous [num_rows, num_in]; returns contiguous [num_rows, num_out]."""
        weight, num_rows = self.weight, x.shape[0]
        num_out, num_in = weight.shape
        out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
        if not num_rows:
            return out
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        units, x_scales = weight.units, None
        if self._in_8_bits and num_rows >= EIGHT_BIT_ROWS:
            x, x_scales = quantize_rows(x, weight)
            units, num_in = units.view(DTYPES[weight.kind]), x.shape[1]
        rows, width = tile_sizes(num_rows, self._max_rows)
        num_tiles = -(-num_rows // rows) * -(-num_out // width)
        splits = 1
        if num_rows <= MOST_SPLIT_ROWS:
            splits = num_splits(num_tiles, self._num_chunks, self._num_programs)
        target = out
        if splits > 1:
            target = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
        bias = None if splits > 1 else self.bias
        _packed_linear_kernel[num_tiles, splits](
            x,
            x_scales,
            units,
            weight.scales,
            weight.zeros,
            weight.row_scales,
            bias,
            target,
            num_rows,
            num_out,
            num_in,
            self._num_chunks,
            -(-self._num_chunks // splits),
            FORMAT=self._format,
            ROWS=rows,
            WIDTH=width,
            BAND=BAND,
            IS_SPLIT=splits > 1,
            **launch_options(rows),
        )
        if splits > 1:
            _add_splits_kernel[(-(-out.numel() // _BLOCK),)](
                target,
                self.bias,
                out,
                out.numel(),
                splits,
                num_out,
                SPLITS=MOST_SPLITS,
                BLOCK=_BLOCK,
                num_warps=4,
            )
        return out
