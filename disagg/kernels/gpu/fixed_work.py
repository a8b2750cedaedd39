"""The attention work of decode steps in buffers of fixed shape, split by the device itself.

A captured graph launches the grids of its capture, with the addresses of its capture. So the list
of pieces has room for the worst case, and unused pieces are empty: a piece without queries and keys
ends at once and writes nothing. A row without a sequence has a piece without keys, which writes
zeros.

The split is the same as in `attention_work.cut`, against which it is tested. Every program
computes the sizes of all pieces, which are a few sums over the step's sequences, and writes its own
pieces.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.attention_work import MIN_SPLIT_KEYS
from disagg.kernels.gpu.launcher import KernelLauncher, next_power_of_2
from disagg.kernels.gpu.paged_work import KEY_TILE, Launch, PagedWork

LEAST_ROWS = 64  # rows of a program; a variant with fewer would be one more kernel to compile


@triton.jit
def store_piece(pieces_ptr, place, sequence, first_query, num_queries, start, end, partial, mask):
    """Store the fields of an `AttentionPiece`."""
    piece_ptr = pieces_ptr + place * 6
    tl.store(piece_ptr, sequence, mask=mask)
    tl.store(piece_ptr + 1, first_query, mask=mask)
    tl.store(piece_ptr + 2, num_queries, mask=mask)
    tl.store(piece_ptr + 3, start, mask=mask)
    tl.store(piece_ptr + 4, end, mask=mask)
    tl.store(piece_ptr + 5, partial, mask=mask)


@triton.jit
def cut_keys(
    rows,
    has_piece,
    query_lens,
    starts,
    ends,
    pieces_ptr,
    reductions_ptr,
    num_pieces,
    num_reductions,
    NUM_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Write the pieces of this program's row, its reduction, and some of the empty pieces.

    Args:
        has_piece: whether a row has pieces; a row without keys has one empty piece.
        starts, ends: the range of keys of each row; empty if it has no piece.
    """
    own = tl.program_id(0)
    nums_keys = ends - starts
    size = tl.maximum(tl.cdiv(tl.sum(nums_keys), NUM_PROGRAMS), LEAST_KEYS)
    size = tl.cdiv(size, TILE) * TILE
    nums_whole = nums_keys // size  # pieces of the common size; the rest is a shorter piece
    nums_left = nums_keys - nums_whole * size
    counts = nums_whole + (nums_left > 0).to(tl.int32)
    is_cut = (counts > 1).to(tl.int32)

    is_own = (rows == own).to(tl.int32)
    is_before = (rows < own).to(tl.int32)
    start, num_queries = tl.sum(starts * is_own), tl.sum(query_lens * is_own)
    num_whole, num_left = tl.sum(nums_whole * is_own), tl.sum(nums_left * is_own)
    count = tl.sum(counts * is_own)
    first_partial = tl.sum(counts * is_cut * is_before)

    # Long pieces start early: first the whole ones, then the rest of each sequence by length.
    index = tl.arange(0, PIECES)
    first, last = start + index * size, start + num_whole * size
    partials = tl.where(count > 1, first_partial + index, -1)
    place = tl.sum(nums_whole * is_before) + index
    is_one = index < num_whole
    store_piece(pieces_ptr, place, own, 0, num_queries, first, first + size, partials, is_one)
    has_last = has_piece & ((nums_left > 0) | (nums_keys == 0))
    is_earlier = (nums_left > num_left) | ((nums_left == num_left) & (rows < own))
    place = tl.sum(nums_whole) + tl.sum((has_last & is_earlier).to(tl.int32))
    partial = tl.where(count > 1, first_partial + num_whole, -1)
    is_one = tl.sum(has_last.to(tl.int32) * is_own) > 0
    store_piece(pieces_ptr, place, own, 0, num_queries, last, last + num_left, partial, is_one)
    reduction_ptr = reductions_ptr + tl.sum(is_cut * is_before) * 5
    tl.store(reduction_ptr, own, mask=count > 1)
    tl.store(reduction_ptr + 1, 0, mask=count > 1)
    tl.store(reduction_ptr + 2, num_queries, mask=count > 1)
    tl.store(reduction_ptr + 3, first_partial, mask=count > 1)
    tl.store(reduction_ptr + 4, count, mask=count > 1)

    num_used = tl.sum(tl.where(has_piece, tl.maximum(counts, 1), 0))
    place = num_used + own + index * tl.num_programs(0)
    store_piece(pieces_ptr, place, 0, 0, 0, 0, 0, -1, place < num_pieces)
    place = tl.sum(is_cut) + own
    for field in tl.static_range(5):
        tl.store(reductions_ptr + place * 5 + field, 0, mask=place < num_reductions)


@triton.jit(
    do_not_specialize=["num_seqs", "num_pieces", "num_reductions"],
    do_not_specialize_on_alignment=["slots_ptr", "context_lens_ptr", "reductions_ptr"],
)
def _cut_kernel(
    slots_ptr,
    context_lens_ptr,
    pieces_ptr,
    reductions_ptr,
    num_seqs,
    num_pieces,
    num_reductions,
    NUM_PROGRAMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_seqs, other=-1)
    ends = tl.load(context_lens_ptr + rows, mask=slots >= 0, other=0)
    starts = ends * 0
    if WINDOW > 0:
        starts = tl.maximum(ends - WINDOW, 0) // TILE * TILE
    cut_keys(
        rows, rows < num_seqs, starts * 0 + 1, starts, ends,
        pieces_ptr, reductions_ptr, num_pieces, num_reductions,
        NUM_PROGRAMS, TILE, LEAST_KEYS, PIECES,
    )  # fmt: skip


_cut = KernelLauncher(_cut_kernel)


def split_keys(num_seqs: int, num_programs: int, num_rows: int, device: torch.device) -> Launch:
    """Allocate a launch with room for any cut of the keys of up to `num_seqs` sequences.

    The last piece of each sequence may be shorter. All other pieces have the common size, of which
    `num_programs` pieces make up the whole step. So at most `num_programs` sequences are cut.

    Args:
        num_programs: pieces per KV head that fill the device.
        num_rows: query rows of a piece.
    """

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    num_reductions = min(num_seqs, num_programs)
    return Launch(
        pieces=zeros(num_seqs + num_programs, 6),
        reductions=zeros(num_reductions, 5),
        num_partials=num_reductions + num_programs,
        rows=max(16, next_power_of_2(num_rows)),
        num_merged_rows=num_rows,
    )


class FixedWork:
    """Pieces of up to `num_seqs` sequences with one token each, for one window.

    Args:
        group: query heads per KV head.
        num_programs: pieces per KV head that fill the device.
    """

    def __init__(
        self,
        num_seqs: int,
        group: int,
        window: int | None,
        num_programs: int,
        device: torch.device,
    ) -> None:
        self._num_seqs = num_seqs
        self._num_programs = num_programs
        launch = split_keys(num_seqs, num_programs, group, device)
        self.work = PagedWork((launch,), window)

    def cut(self, slots: Tensor, context_lens: Tensor) -> None:
        """Cut a step into pieces on the device, in order with its other work.

        Args:
            slots: int64 [num_seqs], the KV slot of each token; negative: the row has no sequence.
            context_lens: int32 [num_seqs].
        """
        (launch,) = self.work.launches
        _cut(
            (self._num_seqs,),
            slots,
            context_lens,
            launch.pieces,
            launch.reductions,
            self._num_seqs,
            launch.pieces.shape[0],
            launch.reductions.shape[0],
            NUM_PROGRAMS=self._num_programs,
            WINDOW=self.work.window or 0,
            TILE=KEY_TILE,
            LEAST_KEYS=MIN_SPLIT_KEYS,
            ROWS=max(LEAST_ROWS, next_power_of_2(self._num_seqs)),
            PIECES=next_power_of_2(self._num_programs),
            num_warps=4,
        )
