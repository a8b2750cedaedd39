"""Bugs of an engine that the checks of one engine must notice, and those of a fleet too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.blocks import BlockHash, hash_block
from disagg.engine.sched import block_tables, scheduler
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence as EngineSequence
from tests.engine.workload import ROOT

_publish = block_tables.publish


def hash_blocks_without_chain(
    parent: BlockHash, tokens: Sequence[int], size: int
) -> list[BlockHash]:
    """In place of `hash_blocks`: a block's name says nothing of the blocks before."""
    starts = range(0, len(tokens) - size + 1, size)
    return [hash_block(ROOT, tokens[start : start + size]) for start in starts]


def publish_before_full(patch: pytest.MonkeyPatch) -> None:
    def publish(pool: BlockPool, sequence: EngineSequence) -> None:
        _publish(pool, sequence)
        i = sequence.num_published
        if i < len(sequence.block_hashes) and sequence.num_computed > i * pool.block_size:
            pool.publish(sequence.block_ids[i], sequence.block_hashes[i])
        sequence.publish_at = 0  # look again after every step

    patch.setattr(scheduler, "publish", publish)
