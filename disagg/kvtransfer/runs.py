"""Merges neighbouring blocks, so that one descriptor moves as many bytes as possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class BlockRun(NamedTuple):
    """`num_blocks` blocks that are neighbours both at the source and here."""

    source_block: int
    local_block: int
    num_blocks: int


def merge_runs(pairs: Iterable[tuple[int, int]]) -> list[BlockRun]:
    """The fewest runs that copy every (source block, local block) pair.

    The order of copying is free, so pairs are sorted first: blocks that were handed out out of
    order but lie side by side still share a descriptor.
    """
    runs: list[BlockRun] = []
    for source, local in sorted(pairs):
        if runs:
            last = runs[-1]
            end_source, end_local = last.source_block + last.num_blocks, last.local_block
            if source == end_source and local == end_local + last.num_blocks:
                runs[-1] = last._replace(num_blocks=last.num_blocks + 1)
                continue
        runs.append(BlockRun(source, local, 1))
    return runs
