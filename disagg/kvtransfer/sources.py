"""Where the bytes of a block come from: one slab, or the ranks of a worker that divide blocks.

All ranks of all workers of a model divide the same whole block, each into a run of bytes
(`slab.BlockPart`), so any number of ranks can pull from any other. Must not know what the bytes
mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from disagg.errors import TransferFailed
from disagg.kvtransfer.runs import BlockRun
from disagg.kvtransfer.slab import Slab, begin_of
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.wire import ByteRange


class Source(NamedTuple):
    """A rank of a peer, and the bytes of each block that are copied from it.

    here, there: where they begin in a block of the slab here, and of the rank's.
    """

    rank: Peer
    here: int
    there: int
    nbytes: int


def sources_of(slab: Slab, peer: Peer) -> tuple[Source, ...]:
    """The ranks of `peer` that together have the bytes of the slab's blocks: as few as possible.

    Where several ranks have the same bytes, the slabs that need them choose different ones.

    Raises:
        TransferFailed: some bytes are on none of them.
    """
    ranks = (replace(peer, ranks=()), *peer.ranks)
    begin = at = begin_of(slab)
    end = begin + slab.block_nbytes
    found: list[Source] = []
    while at < end:
        having = [each for each in ranks if 0 <= at - begin_of(each) < each.block_nbytes]
        if not having:
            parts = ", ".join(f"{begin_of(r)} to {begin_of(r) + r.block_nbytes}" for r in ranks)
            raise TransferFailed(
                f"worker {peer.worker_id} has bytes {parts} of each block, and of the bytes"
                f" {begin} to {end} that are needed here, none of its ranks has byte {at}"
            )
        rank = having[(slab.part.copy if slab.part else 0) % len(having)]
        there = at - begin_of(rank)
        nbytes = min(end - at, rank.block_nbytes - there)
        found.append(Source(rank, at - begin, there, nbytes))
        at += nbytes
    return tuple(found)


def byte_ranges(slab: Slab, source: Source, runs: Iterable[BlockRun]) -> list[ByteRange]:
    """What to copy from a source: one range for each run of whole blocks, or for each block of
    which only a part is copied."""
    rank, nbytes = source.rank, source.nbytes
    if not _are_whole(slab, source):
        runs = (
            BlockRun(run.source_block + i, run.local_block + i, 1)
            for run in runs
            for i in range(run.num_blocks)
        )
    return [
        ByteRange(
            slab.address(run.local_block) + source.here,
            rank.base_address + run.source_block * rank.block_nbytes + source.there,
            run.num_blocks * nbytes,
        )
        for run in runs
    ]


def largest_nbytes(slab: Slab, source: Source, runs: Iterable[BlockRun]) -> int:
    """The largest range of `byte_ranges`, without listing them: a long pull from several ranks has
    thousands."""
    if not _are_whole(slab, source):
        return source.nbytes
    return source.nbytes * max(run.num_blocks for run in runs)


def _are_whole(slab: Slab, source: Source) -> bool:
    """Whether the bytes of a source are whole blocks of both slabs, so that runs are copied."""
    return slab.block_nbytes == source.nbytes == source.rank.block_nbytes
