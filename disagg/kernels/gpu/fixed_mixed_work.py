"""The attention work of short prompts, drafts and decodes in buffers of fixed shape, for graphs.

This works like `fixed_work` for decodes: the buffers have the size of the worst case, the device
itself cuts the step, a piece without queries ends at once, and tokens without a sequence have
pieces without keys, which write zeros. Sequences with few queries are split along their keys, as in
`attention_work.cut`, and the others along their queries alone: a prompt over a long context has no
graph (`mixed_graphs.MAX_CONTEXT`). These are two launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.attention_work import MIN_SPLIT_KEYS
from disagg.kernels.gpu.fixed_work import LEAST_ROWS, cut_keys, split_keys, store_piece
from disagg.kernels.gpu.launcher import KernelLauncher, next_power_of_2
from disagg.kernels.gpu.paged_work import (
    KEY_TILE,
    LONG_ROWS,
    MAX_SHORT_ROWS,
    Launch,
    PagedWork,
)

MAX_SHORT_QUERIES = 8  # a draft of seven tokens, and the token before it


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_short", "num_reductions", "num_long"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr"],
)
def _cut_mixed_kernel(
    query_start_ptr,
    context_lens_ptr,
    short_ptr,
    reductions_ptr,
    long_ptr,
    num_seqs,
    num_tokens,
    num_short,
    num_reductions,
    num_long,
    NUM_PROGRAMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    SHORT_QUERIES: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    LONG_PIECES: tl.constexpr,
):
    """Write the pieces of one sequence. Row `num_seqs` has the tokens without a sequence."""
    own = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    is_one = rows < num_seqs
    first_tokens = tl.load(query_start_ptr + rows, mask=rows <= num_seqs, other=0)
    last_tokens = tl.load(query_start_ptr + rows + 1, mask=is_one, other=0)
    query_lens = tl.where(rows == num_seqs, num_tokens, last_tokens) - first_tokens
    contexts = tl.load(context_lens_ptr + rows, mask=is_one, other=0)

    is_short = is_one & (query_lens <= SHORT_QUERIES)
    ends = tl.where(is_short, contexts, 0)
    starts = ends * 0
    if WINDOW > 0:
        starts = tl.maximum(ends - query_lens - WINDOW + 1, 0) // TILE * TILE
    cut_keys(
        rows, is_short, query_lens, starts, ends,
        short_ptr, reductions_ptr, num_short, num_reductions,
        NUM_PROGRAMS, TILE, LEAST_KEYS, PIECES,
    )  # fmt: skip

    has_long = (is_one & (query_lens > SHORT_QUERIES)) | (rows == num_seqs)
    counts = tl.where(has_long, tl.cdiv(query_lens, QUERIES), 0)
    is_own = (rows == own).to(tl.int32)
    query_len, context = tl.sum(query_lens * is_own), tl.sum(contexts * is_own)
    count = tl.sum(counts * is_own)
    index = tl.arange(0, LONG_PIECES)
    # Long pieces start early: the last queries of a sequence see the most keys.
    first = (count - 1 - index) * QUERIES
    num_queries = tl.minimum(query_len - first, QUERIES)
    before = context - query_len + first
    start = index * 0
    if WINDOW > 0:
        start = tl.maximum(before - WINDOW + 1, 0) // TILE * TILE
    start = tl.where(own < num_seqs, start, 0)
    end = tl.where(own < num_seqs, before + num_queries, 0)
    place = tl.sum(counts * (rows < own).to(tl.int32)) + index
    store_piece(long_ptr, place, own, first, num_queries, start, end, -1, index < count)
    place = tl.sum(counts) + own + index * tl.num_programs(0)
    store_piece(long_ptr, place, 0, 0, 0, 0, 0, -1, place < num_long)


_cut_mixed = KernelLauncher(_cut_mixed_kernel)


class FixedMixedWork:
    """Pieces of steps of up to `num_tokens` tokens of up to `num_seqs` sequences, for one window.

    Args:
        group: query heads per KV head.
        num_programs: pieces per KV head that fill the device.
        long_rows: rows of a prompt's tile.
    """

    def __init__(
        self,
        num_seqs: int,
        num_tokens: int,
        group: int,
        window: int | None,
        num_programs: int,
        device: torch.device,
        long_rows: int = LONG_ROWS,
    ) -> None:
        self._num_programs = num_programs
        self._short_queries = max(1, min(MAX_SHORT_QUERIES, MAX_SHORT_ROWS // group))
        self._num_seqs, self._num_tokens = num_seqs, num_tokens
        long_rows = max(long_rows, next_power_of_2(group))
        self._queries_per_piece = long_rows // group
        # The last piece of a sequence, and of the tokens without one, may be shorter.
        num_long_seqs = min(num_seqs, num_tokens // (self._short_queries + 1))
        num_long = num_tokens // self._queries_per_piece + num_long_seqs + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        short = split_keys(num_seqs, num_programs, self._short_queries * group, device)
        long = Launch(
            pieces=zeros(num_long, 6),
            reductions=zeros(0, 5),
            num_partials=0,
            rows=long_rows,
            num_merged_rows=0,
        )
        self.work = PagedWork((short, long), window)

    def cut(self, query_start: Tensor, context_lens: Tensor, num_seqs: int) -> None:
        """Cut a step into pieces on the device, in order with its other work.

        Args:
            query_start: int32, the first token of each sequence. Tokens after the last sequence
                belong to one additional row, and get zeros.
            context_lens: int32, the context length of each sequence.
            num_seqs: number of sequences in the step.
        """
        short, long = self.work.launches
        _cut_mixed(
            (self._num_seqs + 1,),
            query_start,
            context_lens,
            short.pieces,
            short.reductions,
            long.pieces,
            num_seqs,
            self._num_tokens,
            short.pieces.shape[0],
            short.reductions.shape[0],
            long.pieces.shape[0],
            NUM_PROGRAMS=self._num_programs,
            WINDOW=self.work.window or 0,
            TILE=KEY_TILE,
            LEAST_KEYS=MIN_SPLIT_KEYS,
            SHORT_QUERIES=self._short_queries,
            QUERIES=self._queries_per_piece,
            ROWS=max(LEAST_ROWS, next_power_of_2(self._num_seqs + 1)),
            PIECES=next_power_of_2(self._num_programs),
            LONG_PIECES=next_power_of_2(-(-self._num_tokens // self._queries_per_piece)),
            num_warps=4,
        )
