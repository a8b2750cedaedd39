"""Cuts a step's attention into pieces of similar size on the device, before any layer runs.

A piece is (some queries of one sequence) x (some of its keys). A sequence is first cut into tiles
of queries, as many as the kernel computes together, and then along its keys, until the pieces fill
the device. So one kernel computes skewed batches, single tokens, verification of drafts, and a few
new tokens over a long cached prefix.

The device cuts, also where the host knows all lengths, since a captured graph can be told nothing
else: buffers have room for the worst case, and programs without a piece end at once. Sequences with
few and with many queries are in tiles of two heights, each of which is one launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2

KEY_TILE = 64  # keys of an inner step of the kernel; cuts are at its multiples
MAX_SHORT_ROWS = 64  # of the packed queries of one sequence; a sequence with more is in tiles
MAX_SHORT_QUERIES = 8  # in a graph: a draft of seven tokens, and the token before it
LONG_ROWS = 128
MIN_SPLIT_KEYS = 256  # a partial result costs about as much memory traffic as a few keys
# Of a partial result each row is written and read in float32, which is as much memory traffic as
# two keys and their values in 16 bits. A piece has twice as many keys.
KEYS_PER_ROW = 4
ENDLESS = 1 << 30  # keys of a piece that is not cut

_LEAST_ROWS = 1024  # sequences that a program looks at together; fewer would be one more variant


@triton.jit
def _store_pieces(
    pieces_ptr, places, sequence, first_query, num_queries, starts, ends, partials, mask
):
    piece_ptr = pieces_ptr + places * 6
    tl.store(piece_ptr, sequence, mask=mask)
    tl.store(piece_ptr + 1, first_query, mask=mask)
    tl.store(piece_ptr + 2, num_queries, mask=mask)
    tl.store(piece_ptr + 3, starts, mask=mask)
    tl.store(piece_ptr + 4, ends, mask=mask)
    tl.store(piece_ptr + 5, partials, mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "num_pieces", "least_queries", "most_queries"
    ],
    do_not_specialize_on_alignment=[
        "query_start_ptr", "context_lens_ptr", "pieces_ptr", "reductions_ptr", "counts_ptr"
    ],
)  # fmt: skip
def _cut_kernel(
    query_start_ptr,
    context_lens_ptr,
    pieces_ptr,
    reductions_ptr,
    counts_ptr,
    num_seqs,
    num_tokens,
    num_pieces,
    least_queries,
    most_queries,
    QUERIES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    MOST_TILES: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    ENDLESS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Cut the keys of one tile of queries. Places are given in any order; results do not depend on
    them, since the partial results of a tile lie together, in the order of their keys."""
    tile = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_seqs
    first_tokens = tl.load(query_start_ptr + rows, mask=is_row, other=0)
    last_tokens = tl.load(query_start_ptr + rows + 1, mask=is_row, other=0)
    contexts = tl.load(context_lens_ptr + rows, mask=is_row, other=0)
    # Rows of a graph beyond the step's sequences begin and end behind its last token.
    query_lens = tl.minimum(last_tokens, num_tokens) - tl.minimum(first_tokens, num_tokens)
    is_taken = (query_lens >= least_queries) & (query_lens <= most_queries)
    nums_tiles = tl.where(is_taken, tl.cdiv(query_lens, QUERIES), 0)
    num_tiles = tl.sum(nums_tiles)
    if tile < num_tiles:
        # Tile t of a sequence sees all keys up to its last query; of a window, at most these.
        nums_keys = nums_tiles * (contexts - query_lens) + query_lens
        nums_keys += QUERIES * (nums_tiles * (nums_tiles - 1) // 2)
        if WINDOW > 0:
            nums_keys = tl.minimum(nums_keys, nums_tiles * (WINDOW + QUERIES + TILE))
        num_keys = tl.sum(tl.where(is_taken & (contexts > 0), nums_keys, 0))
        size = tl.maximum(tl.cdiv(num_keys, NUM_PROGRAMS), LEAST_KEYS)
        size = tl.where(num_tiles < MOST_TILES, tl.cdiv(size, TILE) * TILE, ENDLESS)

        until = tl.cumsum(nums_tiles)
        sequence = tl.sum((until <= tile).to(tl.int32))
        is_own = (rows == sequence).to(tl.int32)
        first_query = (tile - tl.sum((until - nums_tiles) * is_own)) * QUERIES
        query_len, context = tl.sum(query_lens * is_own), tl.sum(contexts * is_own)
        num_queries = tl.minimum(query_len - first_query, QUERIES)
        first_position = context - query_len + first_query
        # Tokens of no sequence have no context: a piece without keys writes zeros.
        end = tl.where(context > 0, first_position + num_queries, 0)
        start = end * 0
        if WINDOW > 0:
            start = tl.minimum(tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE, end)
        num_whole = (end - start) // size
        has_rest = ((start + num_whole * size < end) | (start == end)).to(tl.int32)
        count = num_whole + has_rest
        partial = -1
        if count > 1:
            partial = tl.atomic_add(counts_ptr + 3, count)
            reduction_ptr = reductions_ptr + tl.atomic_add(counts_ptr + 2, 1) * 5
            tl.store(reduction_ptr, sequence)
            tl.store(reduction_ptr + 1, first_query)
            tl.store(reduction_ptr + 2, num_queries)
            tl.store(reduction_ptr + 3, partial)
            tl.store(reduction_ptr + 4, count)
        # Whole pieces come first, and what is left of tiles last: long pieces start early.
        place = tl.atomic_add(counts_ptr, num_whole)
        for begin in range(0, num_whole, PIECES):
            index = begin + tl.arange(0, PIECES)
            starts = start + index * size
            partials = tl.where(count > 1, partial + index, -1)
            _store_pieces(
                pieces_ptr, place + index, sequence, first_query, num_queries,
                starts, starts + size, partials, index < num_whole,
            )  # fmt: skip
        if has_rest > 0:
            place = num_pieces - 1 - tl.atomic_add(counts_ptr + 1, 1)
            partial = tl.where(count > 1, partial + num_whole, -1)
            _store_pieces(
                pieces_ptr, place, sequence, first_query, num_queries,
                start + num_whole * size, end, partial, has_rest > 0,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """The pieces of all sequences with so many queries, which are one launch of the kernel.

    Attributes:
        pieces: int32 [num_pieces, 6]: sequence, first query and number of queries in the
            sequence's step, first key (a multiple of `KEY_TILE`) and end of the keys, row of the
            unnormalised partial result or -1 if the result is final. Those of the common size
            stand at the beginning, shorter ones at the end; what lies between is undefined.
        reductions: int32 [num_reductions, 5]: sequence, first query, number of queries, first
            partial result, number of partial results.
        counts: int32 [4]: pieces at the beginning, pieces at the end, reductions, partial results.
        num_partials: number of partial results for which there is room.
        num_merged_rows: most rows of a tile that a reduction may have.
        rows: rows of a tile, a power of two: queries x the heads that share a key.
        group: query heads that share a key.
        least_queries, most_queries: of a sequence in this launch.
        num_programs: pieces per KV head that fill the device.
        is_split_always: whether keys are cut even if there are as many tiles as that.
    """

    pieces: Tensor
    reductions: Tensor
    counts: Tensor
    num_partials: int
    num_merged_rows: int
    rows: int
    group: int
    least_queries: int
    most_queries: int
    num_programs: int
    is_split_always: bool

    def cut(
        self, query_start: Tensor, context_lens: Tensor, num_tokens: int, window: int | None
    ) -> None:
        """Cut a step on the device, in order with its other work.

        Args:
            query_start: int32 [num_seqs + 1], the first token of each sequence, and the end. What
                lies at or beyond `num_tokens` counts as there.
            context_lens: int32 [num_seqs], the context of each sequence; 0 for tokens without one.
        """
        self.counts.zero_()
        num_seqs = context_lens.shape[0]
        least_keys = max(MIN_SPLIT_KEYS, KEYS_PER_ROW * self.rows)
        _cut_kernel[self.pieces.shape[0] - self.num_programs,](
            query_start,
            context_lens,
            self.pieces,
            self.reductions,
            self.counts,
            num_seqs,
            num_tokens,
            self.pieces.shape[0],
            self.least_queries,
            self.most_queries,
            QUERIES=self.rows // self.group,
            NUM_PROGRAMS=self.num_programs,
            MOST_TILES=ENDLESS if self.is_split_always else self.num_programs,
            LEAST_KEYS=MIN_SPLIT_KEYS if self.is_split_always else least_keys,
            WINDOW=window or 0,
            TILE=KEY_TILE,
            ENDLESS=ENDLESS,
            ROWS=max(_LEAST_ROWS, next_power_of_2(num_seqs)),
            PIECES=64,
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The work of steps for one window, which its layers share."""

    launches: tuple[Launch, ...]
    window: int | None

    def cut(self, query_start: Tensor, context_lens: Tensor, num_tokens: int) -> None:
        for launch in self.launches:
            launch.cut(query_start, context_lens, num_tokens, self.window)


def attention_work(
    num_seqs: int,
    num_tokens: int,
    group: int,
    window: int | None,
    num_programs: int,
    device: torch.device,
    *,
    short_queries: int,
    has_long: bool,
    long_rows: int = LONG_ROWS,
) -> AttentionWork:
    """Room for the pieces of any step of so many sequences and tokens.

    Args:
        group: query heads that share a key.
        num_programs: pieces per KV head that fill the device.
        short_queries: the most queries of a sequence whose tile is as high as they need, at most
            `MAX_SHORT_ROWS` / group; 0: there is no such sequence.
        has_long: whether sequences may have more; they are in tiles of `long_rows`.
    """

    def launch(rows: int, queries: tuple[int, int], *, is_long: bool) -> Launch:
        """Of sequences with so many queries."""
        most_merged = rows if is_long else short_queries  # queries whose keys are cut
        num_tiles = min(num_tokens, num_tokens // (rows // group) + num_seqs)
        # At most `num_programs` pieces have the common size, one for each tile is shorter.
        num_reductions = min(num_tiles, num_programs)
        sizes = (num_tiles + num_programs, 6), (num_reductions, 5), (4,)
        pieces, reductions, counts = (
            torch.empty(size, dtype=torch.int32, device=device) for size in sizes
        )
        return Launch(
            pieces=pieces,
            reductions=reductions,
            counts=counts,
            num_partials=num_reductions + num_programs,
            num_merged_rows=min(rows // group, most_merged) * group,
            rows=rows,
            group=group,
            least_queries=queries[0],
            most_queries=queries[1],
            num_programs=num_programs,
            # Partial results are as large as the tiles: of high ones only a device with too few
            # tiles gets some.
            is_split_always=not is_long,
        )

    launches = []
    if short_queries:
        rows = max(16, next_power_of_2(short_queries * group))
        queries = 1, short_queries if has_long else ENDLESS
        launches.append(launch(rows, queries, is_long=False))
    if has_long:
        rows = max(long_rows, next_power_of_2(group))
        launches.append(launch(rows, (short_queries + 1, ENDLESS), is_long=True))
    return AttentionWork(tuple(launches), window)
