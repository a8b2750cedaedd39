"""A step's attention as lists of pieces on the device, one for each launch of the kernel."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.gpu.attention_work import MIN_SPLIT_KEYS, AttentionPiece, Reduction, cut
from disagg.kernels.gpu.launcher import next_power_of_2
from disagg.kernels.uploads import upload

KEY_TILE = 64
MAX_SHORT_ROWS = 64  # of the packed queries of one sequence; a sequence with more is in tiles
LONG_ROWS = 128
# Of a partial result each row is written and read in float32, which is as much memory traffic as
# two keys and their values in 16 bits. A piece has twice as many keys.
KEYS_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: its pieces on the device, and the rows of a query tile.

    Attributes:
        num_partials: number of partial results for which there is room.
        rows: rows of a tile, a power of two.
        num_merged_rows: most rows of a tile that a reduction may have.
    """

    pieces: Tensor  # int32 [num_pieces, 6]
    reductions: Tensor  # int32 [num_reductions, 5]
    num_partials: int
    rows: int
    num_merged_rows: int


@dataclass(frozen=True, slots=True)
class PagedWork:
    """The work of one step for one window, which its layers share."""

    launches: tuple[Launch, ...]
    window: int | None


def plan_work(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    group: int,
    window: int | None,
    num_programs: int,
    device: torch.device,
    done_elsewhere: Container[int] = (),
    long_rows: int = LONG_ROWS,
) -> PagedWork:
    """Cut a step into pieces and put the lists on the device.

    Args:
        group: query heads per KV head.
        num_programs: pieces per KV head that fill the device.
        done_elsewhere: sequences whose rows of the result another kernel writes.
        long_rows: rows of a prompt's tile.
    """
    rows = [
        (sequence, *lens)
        for sequence, lens in enumerate(zip(query_lens, context_lens, strict=True))
        if sequence not in done_elsewhere
    ]
    short = [row for row in rows if row[1] * group <= MAX_SHORT_ROWS]
    long = [row for row in rows if row[1] * group > MAX_SHORT_ROWS]
    launches = []
    if short:
        num_rows = max(row[1] for row in short) * group
        height = max(16, next_power_of_2(num_rows))
        pieces, reductions = cut(short, window, KEY_TILE, num_programs, height // group)
        launches.append(_launch(pieces, reductions, height, num_rows, device))
    if long:
        height = max(long_rows, next_power_of_2(group))
        num_queries = height // group
        # Partial results are as large as the tiles: only a device that has too few tiles gets some.
        num_tiles = sum(-(-row[1] // num_queries) for row in long)
        least_keys = max(MIN_SPLIT_KEYS, KEYS_PER_ROW * height)
        if num_tiles >= num_programs:
            least_keys = max(row[2] for row in long)
        pieces, reductions = cut(long, window, KEY_TILE, num_programs, num_queries, least_keys)
        launches.append(_launch(pieces, reductions, height, num_queries * group, device))
    return PagedWork(tuple(launches), window)


def _launch(
    pieces: list[AttentionPiece],
    reductions: list[Reduction],
    rows: int,
    num_merged_rows: int,
    device: torch.device,
) -> Launch:
    numbers: list[int] = []
    for p in pieces:
        numbers += (p.sequence, p.first_query, p.num_queries, p.start, p.end, p.partial)
    for r in reductions:
        numbers += (r.sequence, r.first_query, r.num_queries, r.first_partial, r.num_partials)
    uploaded = upload(numbers, torch.int32, device)
    num_first = len(pieces) * 6
    return Launch(
        pieces=uploaded[:num_first].view(-1, 6),
        reductions=uploaded[num_first:].view(-1, 5),
        num_partials=sum(merge.num_partials for merge in reductions),
        rows=rows,
        num_merged_rows=num_merged_rows,
    )
