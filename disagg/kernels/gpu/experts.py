"""A mixture of experts in Triton: one launch for gate and up of all experts, one for down.

A row is a token with one of its experts. Rows are sorted by expert. A program multiplies up to ROWS
rows of one expert with a tile of the expert's matrix, and finds out itself which rows these are:
the grid is sized for the worst case, and programs without rows end at once. So the host does not
wait for the router's choice, and one captured graph serves every choice. One program writes each
row's result, and the results of a token are summed in the order of its choices, so a result does
not depend on timing. If other ranks have some of the experts, the rows of these come before and
after the rank's own rows and belong to no program, so they are neither computed nor summed.

Packed matrices are widened in registers, as `packed_tile` does for dense layers; the rows of all
experts are one matrix.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.eight_bit_tile import (
    CHUNK,
    DTYPES,
    eight_bit_tile,
    kinds_of,
    quantize_rows,
    why_16_bits,
)
from disagg.kernels.gpu.held_rows import sum_held
from disagg.kernels.gpu.packed_tile import WARP_GROUPS, TileFormat, packed_tile
from disagg.kernels.gpu.packed_tile import launch_options as packed_launch_options
from disagg.kernels.gpu.packed_tile import max_rows as packed_max_rows
from disagg.kernels.gpu.route import choose_experts
from disagg.kernels.ops import Experts
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.packed_sizes import EIGHT_BIT_ROWS

MIN_ROWS, MAX_ROWS = 16, 128
MAX_B200_ROWS_IN_8_BITS = 64  # taller tiles spill registers there
_MOST_NUMBERS = 1 << 31  # of activations in 8 bits, whose places are int32
WIDTH = 128  # rows of a matrix in a program: 64 each of gate and up


@triton.jit
def _own_rows(
    starts_ptr, block, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):
    """The expert of a block, its first row and the end of its rows; 0 and 0: it has no rows."""
    experts = tl.arange(0, EXPERTS)
    begins = tl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=experts < NUM_EXPERTS, other=0)
    counts = tl.cdiv(ends - begins, ROWS)
    before = tl.cumsum(counts, axis=0) - counts
    is_own = (before <= block) & (block < before + counts)
    first = tl.sum(tl.where(is_own, begins + (block - before) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(is_own, ends, 0), axis=0)
    return tl.sum(tl.where(is_own, experts, 0), axis=0).to(tl.int64), first, end


@triton.jit
def _product(
    x_ptr,
    x_scales_ptr,
    rows,
    is_row,
    matrix_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    expert,
    own,
    is_own,
    NUM_EXPERTS: tl.constexpr,
    NUM_OUT: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute x W^T, [ROWS, WIDTH]. x is some `rows`, which may all be read, in 8 bits if they have
    scales. W is the rows `own` of an expert's NUM_OUT rows of SIZE values.
    FORMAT: the `TileFormat` of W; None: it has floats."""
    DEPTH: tl.constexpr = 64  # values of a row in a step of the inner loop
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    x_ptrs = x_ptr + rows[:, None] * SIZE
    if x_scales_ptr is not None:
        num_own: tl.constexpr = (SIZE + CHUNK - 1) // CHUNK
        padded: tl.constexpr = num_own * CHUNK
        group: tl.constexpr = FORMAT.group if FORMAT.group else padded
        num_groups: tl.constexpr = (padded + group - 1) // group
        few = rows.to(tl.int32)  # the host sees to it, and the tile needs the registers
        sums = eight_bit_tile(
            x_ptr + few[:, None] * padded, x_scales_ptr + few * num_groups, matrix_ptr, scales_ptr,
            expert.to(tl.int32) * NUM_OUT + tl.minimum(own, NUM_OUT - 1),
            NUM_EXPERTS * NUM_OUT, num_own, 0, num_own, FORMAT.group, ROWS, WIDTH,
        )  # fmt: skip
        acc = tl.trans(sums)
    elif FORMAT is not None:
        chunk: tl.constexpr = FORMAT.part * 16  # bits
        num_chunks: tl.constexpr = (SIZE * FORMAT.bits + chunk - 1) // chunk
        row = expert.to(tl.int32) * NUM_OUT + tl.minimum(own, NUM_OUT - 1)
        sums = packed_tile(
            x_ptrs, is_row[:, None], matrix_ptr, scales_ptr, zeros_ptr, row_scales_ptr, row,
            NUM_EXPERTS * NUM_OUT, SIZE, num_chunks, 0, num_chunks, FORMAT, ROWS, WIDTH,
        )  # fmt: skip
        acc = tl.trans(sums)
    else:
        w_ptrs = matrix_ptr + expert * (NUM_OUT * SIZE) + own[:, None] * SIZE
        for start in range(0, SIZE, DEPTH):
            at = (start + depth)[None, :]
            x = tl.load(x_ptrs + at, mask=is_row[:, None] & (at < SIZE), other=0.0)
            w = tl.load(w_ptrs + at, mask=is_own[:, None] & (at < SIZE), other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _gate_up_kernel(
    x_ptr,
    x_scales_ptr,
    matrix_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    order_ptr,
    starts_ptr,
    bias_ptr,
    inner_ptr,
    limit,
    alpha,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    expert, first, end = _own_rows(starts_ptr, tl.program_id(0), NUM_EXPERTS, EXPERTS, ROWS)
    if first < end:
        rows = first + tl.arange(0, ROWS)
        is_row = rows < end
        tokens = tl.load(order_ptr + rows, mask=is_row, other=0) // NUM_CHOSEN
        # Rows of gate and up alternate, so that pairs of results are adjacent.
        places = tl.arange(0, WIDTH)
        column = tl.program_id(1) * (WIDTH // 2) + places // 2
        own = (places % 2) * INNER + column
        acc = _product(
            x_ptr, x_scales_ptr, tokens, is_row, matrix_ptr, scales_ptr, zeros_ptr, row_scales_ptr,
            expert, own, column < INNER, NUM_EXPERTS, 2 * INNER, HIDDEN, ROWS, WIDTH, FORMAT,
        )  # fmt: skip
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * (2 * INNER) + own
            acc += tl.load(bias_ptrs, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(acc, [ROWS, WIDTH // 2, 2]))
        if CLAMPED:  # NaN must stay, and would become the limit
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
            made = up * gate / (1.0 + tl.exp(-alpha * gate))
        else:
            made = up * gate / (1.0 + tl.exp(-gate))
        column = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        inner_ptrs = inner_ptr + rows.to(tl.int64)[:, None] * INNER + column[None, :]
        mask = is_row[:, None] & (column < INNER)[None, :]
        tl.store(inner_ptrs, made.to(inner_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down_kernel(
    inner_ptr,
    inner_scales_ptr,
    matrix_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    order_ptr,
    starts_ptr,
    bias_ptr,
    weights_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    expert, first, end = _own_rows(starts_ptr, tl.program_id(0), NUM_EXPERTS, EXPERTS, ROWS)
    if first < end:
        rows = first + tl.arange(0, ROWS)
        is_row = rows < end
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        acc = _product(
            inner_ptr, inner_scales_ptr, tl.minimum(rows, end - 1).to(tl.int64), is_row,
            matrix_ptr, scales_ptr, zeros_ptr, row_scales_ptr, expert, column, column < HIDDEN,
            NUM_EXPERTS, HIDDEN, INNER, ROWS, WIDTH, FORMAT,
        )  # fmt: skip
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * HIDDEN + column
            acc += tl.load(bias_ptrs, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        pairs = tl.load(order_ptr + rows, mask=is_row, other=0)
        acc *= tl.load(weights_ptr + pairs, mask=is_row, other=0.0)[:, None]
        out_ptrs = out_ptr + pairs[:, None] * HIDDEN + column[None, :]
        mask = is_row[:, None] & (column < HIDDEN)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch_options(rows: int, *, is_packed: bool) -> dict[str, int]:
    """Warps and pipeline depth for a tile of so many rows."""
    if is_packed:
        return packed_launch_options(rows)
    return {"num_warps": 4 if rows < MAX_ROWS else 8, "num_stages": 4 if rows < MAX_ROWS else 3}


class _Matrix(NamedTuple):
    """A matrix of all experts, as it is passed to a kernel.

    Attributes:
        pieces: numbers, scales, zeros, row scales.
        format: as a constant of a kernel; None: it has floats.
        max_rows: most rows of a tile.
        order: order of its columns, as in `PackedMatrix`.
        in_8_bits: the matrix, if its products of many rows are in 8 bits.
    """

    pieces: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    format: TileFormat | None
    max_rows: int
    order: Tensor | None
    in_8_bits: PackedMatrix | None = None

    def operands(self, x: Tensor, *, in_8_bits: bool) -> tuple[Tensor | None, ...]:
        """x as a kernel multiplies it, its scales, and the pieces."""
        if in_8_bits and self.in_8_bits is not None:
            units, *others = self.pieces
            numbers, scales = quantize_rows(x, self.in_8_bits)
            return numbers, scales, units.view(DTYPES[self.in_8_bits.kind]), *others
        return x if self.order is None else x.index_select(1, self.order), None, *self.pieces


def _matrix(stored: Tensor | PackedMatrix, capability: tuple[int, int]) -> _Matrix:
    major = capability[0]
    if not isinstance(stored, PackedMatrix):
        return _Matrix((stored, None, None, None), None, MAX_ROWS, None)
    pieces = stored.units, stored.scales, stored.zeros, stored.row_scales
    most = packed_max_rows(stored.kind, stored.group, major)
    format, eight_bits = TileFormat.of(stored.kind, stored.group), kinds_of(capability)
    in_8_bits = None if why_16_bits(stored, eight_bits) else stored
    if in_8_bits is not None and major == WARP_GROUPS[1]:
        most = MAX_B200_ROWS_IN_8_BITS
    return _Matrix(pieces, format, most, stored.order, in_8_bits)


class TritonExperts:
    """The experts of a layer on a GPU, in the layout in which they are stored."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        device = experts.gate_up.device
        is_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if is_gpu else (WARP_GROUPS[0], 0)
        self._gate_up = _matrix(experts.gate_up, capability)
        self._down = _matrix(experts.down, capability)
        self._max_rows = min(self._gate_up.max_rows, self._down.max_rows)
        self._held = held = experts.held
        self._hidden = math.prod(experts.down.shape[:-1]) // len(held)
        ends = held.start, held.stop + 1
        self._numbers = torch.arange(*ends, dtype=torch.int32, device=device)

    @property
    def variant(self) -> tuple[object, ...]:
        """The properties that determine, with the number of tokens, the needed programs."""
        experts = self._experts
        numbers = experts.num_experts, experts.num_chosen, experts.limit is None
        formats = self._gate_up.format, self._down.format
        pieces = (*self._gate_up.pieces, *self._down.pieces, experts.gate_up_bias)
        types = (None if each is None else each.dtype for each in pieces)
        inputs = (getattr(each, "input_scale", None) for each in (experts.gate_up, experts.down))
        scales = (each and bool(each) for each in inputs)
        return (*numbers, *formats, *types, *scales, *experts.gate_up.shape, *experts.down.shape)

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the programs for all numbers of tokens, with activations of `dtype`."""
        experts, device = self._experts, self._numbers.device
        heights = (rows for rows in (16, 32, 64, 128) if rows <= self._max_rows)
        for rows in (*heights, EIGHT_BIT_ROWS):
            num_tokens = -(-rows * experts.num_experts // experts.num_chosen)
            x = torch.zeros(num_tokens, self._hidden, dtype=dtype, device=device)
            self(x, x.new_zeros(num_tokens, experts.num_experts))

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Ops.mix_experts`."""
        num_tokens, hidden = x.shape
        if not num_tokens:
            return x.clone()
        experts = self._experts
        how = experts.num_chosen, experts.is_normalized, experts.score_bias, experts.grouping
        weights, chosen = choose_experts(logits, *how)
        by_expert, order = torch.sort(chosen.flatten(), stable=True)
        starts = torch.searchsorted(by_expert, self._numbers, out_int32=True)
        num_pairs, num_held = num_tokens * experts.num_chosen, len(self._held)
        size = experts.inner
        inner = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
        out = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
        usual = num_pairs // experts.num_experts  # rows of an average expert
        rows = max(MIN_ROWS, min(next_power_of_2(usual), self._max_rows))
        has_few = num_pairs * max(hidden, size) < _MOST_NUMBERS
        in_8_bits = usual >= EIGHT_BIT_ROWS and has_few
        num_hit = min(num_held, num_pairs)
        # The worst case: each expert's last block is nearly empty, and all tokens go to experts of
        # this rank.
        num_blocks = (num_pairs + num_hit * (rows - 1)) // rows
        sizes = {
            "NUM_EXPERTS": num_held,
            "EXPERTS": next_power_of_2(num_held),
            "HIDDEN": hidden,
            "INNER": size,
            "ROWS": rows,
            "WIDTH": WIDTH,
        }
        _gate_up_kernel[num_blocks, -(-size // (WIDTH // 2))](
            *self._gate_up.operands(x, in_8_bits=in_8_bits),
            order,
            starts,
            experts.gate_up_bias,
            inner,
            experts.limit or 0.0,
            experts.alpha,
            NUM_CHOSEN=experts.num_chosen,
            CLAMPED=experts.limit is not None,
            **sizes,
            FORMAT=self._gate_up.format,
            **launch_options(rows, is_packed=self._gate_up.format is not None),
        )
        _down_kernel[num_blocks, -(-hidden // WIDTH)](
            *self._down.operands(inner, in_8_bits=in_8_bits),
            order,
            starts,
            experts.down_bias,
            weights,
            out,
            **sizes,
            FORMAT=self._down.format,
            **launch_options(rows, is_packed=self._down.format is not None),
        )
        if num_held < experts.num_experts:
            return sum_held(out, chosen, self._held)
        return out.view(num_tokens, -1, hidden).sum(1)
