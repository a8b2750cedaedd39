"""LoRA for rows with different adapters, as two Triton kernels; see `kernels.adapters`.

The device sorts a step's rows by adapter, and a program computes a tile of rows of one slot. Grids
follow from the number of rows and slots alone, so a graph serves every step: programs of slots
without rows end at once. In small steps several programs share the columns of A ("shrink"), and
"expand" adds up their sums, always in the same order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.adapters import AdaptedMatrix

FEW_ROWS, MANY_ROWS = 16, 64  # of a tile
MOST_FEW = 256  # steps with more rows have tiles of many
WIDTH = 64  # outputs of a program of "expand"
COLUMNS = 64  # of A that are multiplied at a time
SPLITS = 8  # programs that share the columns of A in small steps


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    order_ptr,
    starts_ptr,
    sums_ptr,
    num_rows,
    num_tiles,
    x_stride,
    NUM_IN: tl.constexpr,
    SUMS: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sums[split, place, :] = x[row] A^T over the split's columns, for the sorted rows of a slot.

    Args:
        sums_ptr: float32 [num_splits, num_rows, SUMS].
        OWN: columns of a split, a multiple of COLUMNS.
        TILE: sums of a program; it divides SUMS.
    """
    tile, split = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    first, slot = tl.program_id(1) * TILE, tl.program_id(2)
    begin = tl.load(starts_ptr + slot) + tile * ROWS
    end = tl.load(starts_ptr + slot + 1)
    if begin < end:
        places = begin + tl.arange(0, ROWS)
        is_row = places < end
        rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
        own = first + tl.arange(0, TILE)
        x_ptrs = x_ptr + rows[:, None] * x_stride
        a_ptrs = a_ptr + slot.to(tl.int64) * (SUMS * NUM_IN) + own[None, :] * NUM_IN
        acc = tl.zeros([ROWS, TILE], dtype=tl.float32)
        for chunk in range(0, OWN, COLUMNS):
            columns = split * OWN + chunk + tl.arange(0, COLUMNS)
            inside = columns < NUM_IN
            x = tl.load(
                x_ptrs + columns[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
            )
            a = tl.load(a_ptrs + columns[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(x, a, acc, input_precision="ieee")
        target = (split * num_rows + places).to(tl.int64)[:, None] * SUMS + own[None, :]
        tl.store(sums_ptr + target, acc, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_splits", "second", "third", "end_of_all"])
def _expand_kernel(
    sums_ptr,
    b_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    num_splits,
    second,
    third,
    end_of_all,
    out_stride,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """out[row, own] += B[own] y, for the sorted rows of a slot and WIDTH values of one output.

    Args:
        second, third, end_of_all: first row of the second and the third output, and the end.
        PART: of the rank, that is multiplied at a time; it divides RANK.
    """
    tile, slot = tl.program_id(0), tl.program_id(2) // OUTPUTS
    output = tl.program_id(2) % OUTPUTS
    low = tl.where(output == 0, 0, tl.where(output == 1, second, third))
    high = tl.where(output == 0, second, tl.where(output == 1, third, end_of_all))
    begin = tl.load(starts_ptr + slot) + tile * ROWS
    end = tl.load(starts_ptr + slot + 1)
    if (begin < end) & (low + tl.program_id(1) * WIDTH < high):
        places = begin + tl.arange(0, ROWS)
        is_row = places < end
        own = low + tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        is_own = own < high
        rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
        b_ptrs = b_ptr + (slot.to(tl.int64) * end_of_all + own)[None, :] * RANK
        acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        for first in range(0, RANK, PART):
            part = first + tl.arange(0, PART)
            at = places.to(tl.int64)[:, None] * (OUTPUTS * RANK) + output * RANK + part[None, :]
            shrunk = tl.zeros([ROWS, PART], dtype=tl.float32)
            for _ in range(num_splits):
                shrunk += tl.load(sums_ptr + at, mask=is_row[:, None], other=0.0)
                at += tl.cast(num_rows, tl.int64) * (OUTPUTS * RANK)
            b = tl.load(b_ptrs + part[:, None], mask=is_own[None, :], other=0.0)
            acc = tl.dot(shrunk.to(b.dtype), b, acc, input_precision="ieee")
        out_ptrs = out_ptr + rows[:, None] * out_stride + own[None, :]
        mask = is_row[:, None] & is_own[None, :]
        before = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, (before + acc).to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class AdapterGroups:
    """The rows of a step, sorted by the slot of their adapter on the device.

    order: int32 [num_rows]: rows; those without an adapter come first.
    starts: int32 [num_slots + 1]: the place in `order` of each slot's first row, and the end.
    """

    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, adapters: Tensor, num_slots: int) -> AdapterGroups:
        """See `Ops.plan_adapters`. The host does not wait."""
        ordered, order = torch.sort(adapters, stable=True)
        slots = torch.arange(num_slots + 1, dtype=ordered.dtype, device=ordered.device)
        return cls(order.int(), torch.searchsorted(ordered, slots, out_int32=True))


def adapt_rows_(out: Tensor, x: Tensor, matrix: AdaptedMatrix, groups: AdapterGroups) -> Tensor:
    """As `kernels.adapters.adapt_rows_`. The last dimensions of `out` and `x` are contiguous."""
    num_rows, num_in = x.shape
    if not num_rows:
        return out
    num_slots, num_sums, _ = matrix.a.shape
    is_few = num_rows <= MOST_FEW
    rows, tile = FEW_ROWS if is_few else MANY_ROWS, largest_part(matrix.rank)
    num_tiles = -(-num_rows // rows)
    num_chunks = -(-num_in // COLUMNS)
    num_own = -(-num_chunks // (min(SPLITS, num_chunks) if is_few else 1))
    num_splits = -(-num_chunks // num_own)
    sums = torch.empty(num_splits, num_rows, num_sums, dtype=torch.float32, device=x.device)
    _shrink_kernel[num_tiles * num_splits, num_sums // tile, num_slots](
        x,
        matrix.a,
        groups.order,
        groups.starts,
        sums,
        num_rows,
        num_tiles,
        x.stride(0),
        NUM_IN=num_in,
        SUMS=num_sums,
        OWN=num_own * COLUMNS,
        ROWS=rows,
        TILE=tile,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    bounds = matrix.bounds
    num_outputs = len(bounds) - 1
    widest = max(end - first for first, end in pairwise(bounds))
    inner = [*bounds[1:-1], bounds[-1], bounds[-1]][:2]  # the first rows of outputs 1 and 2
    _expand_kernel[num_tiles, -(-widest // WIDTH), num_slots * num_outputs](
        sums,
        matrix.b,
        groups.order,
        groups.starts,
        out,
        num_rows,
        num_splits,
        *inner,
        bounds[-1],
        out.stride(0),
        OUTPUTS=num_outputs,
        RANK=matrix.rank,
        ROWS=rows,
        WIDTH=WIDTH,
        PART=tile,
        num_warps=4,
    )
    return out


def largest_part(rank: int) -> int:
    """The largest of 64, 32 and 16 that divides a rank, which is a multiple of 16."""
    return next(part for part in (64, 32, 16) if rank % part == 0)
