"""The reader's side of pulls: known peers, used tickets, and blocks that are being filled.

All ranks of all workers of a model divide the same whole block, each into a run of bytes
(`slab.BlockPart`), so any number of ranks can pull from any other (`sources_of`).

Every transport checks a pull here before it builds a descriptor, and checks the stamps here after
the copy (`Pull.is_unchanged`). Must not know how bytes move.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from disagg.errors import StartupError, TransferFailed
from disagg.host import BOOT_ID, read_text
from disagg.kvtransfer.slab import (
    GENERATION_NBYTES,
    BlockRun,
    Slab,
    Stamps,
    begin_of,
    merge_runs,
    whole_nbytes,
)
from disagg.kvtransfer.ticket import KVTicket, Peer, check_block_ids

MAX_PEERS = 1024  # one more forgets the peer that was used least recently
MAX_USED_TICKETS = 4096  # are remembered; forgetting one is harmless: the stamps still decide
MAX_TICKET_ID_NBYTES = 256

TicketName: TypeAlias = tuple[str, int, str]  # source, epoch, id: unique among all workers


class ByteRange(NamedTuple):
    """One run of bytes to copy."""

    local_address: int
    remote_address: int
    nbytes: int


class Source(NamedTuple):
    """A rank of a peer, and the bytes of each block that are copied from it.

    here, there: where they begin in a block of the slab here, and of the rank's.
    """

    rank: Peer
    here: int
    there: int
    nbytes: int


def describe(transport: str, slab: Slab, stamps: Stamps, agent: bytes = b"") -> Peer:
    """The record by which peers reach this worker's slab.

    Raises:
        StartupError: the worker has no id, or its stamps are not those of its slab.
    """
    if not stamps.worker_id:
        raise StartupError("a worker needs an id before others can reach it")
    if stamps.nbytes != slab.num_blocks * GENERATION_NBYTES:
        raise StartupError(
            f"the slab has {slab.num_blocks} blocks, the stamp table"
            f" {stamps.nbytes // GENERATION_NBYTES}; every block needs one stamp"
        )
    return Peer(
        worker_id=stamps.worker_id,
        epoch=stamps.epoch,
        transport=transport,
        layout=slab.layout,
        num_blocks=slab.num_blocks,
        block_nbytes=slab.block_nbytes,
        base_address=slab.base_address,
        stamps_address=stamps.address,
        device_id=slab.device_id,
        agent=agent,
        node=read_text(BOOT_ID),
        part=slab.part,
    )


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull that passed every check.

    peer: the source as the ticket names it: a worker, by its first rank, which has the stamps.
    sources: the ranks of it from which bytes of each block are copied.
    """

    pull_id: int
    ticket: KVTicket
    peer: Peer
    sources: tuple[Source, ...]
    runs: tuple[BlockRun, ...]
    local_blocks: tuple[int, ...]
    generations: tuple[int, ...]  # what the source's stamps must be, one per local block
    started_at: float
    releases: bool = True  # the source is told when it has ended

    @property
    def num_blocks(self) -> int:
        return len(self.local_blocks)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * sum(source.nbytes for source in self.sources)

    def block_ranges(self, slab: Slab, source: Source) -> list[ByteRange]:
        """The byte ranges to copy from a source into this slab: one for each run of whole blocks,
        or for each block of which only a part is copied."""
        rank, nbytes, runs = source.rank, source.nbytes, self.runs
        if not _are_whole(slab, source):
            runs = tuple(
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

    def largest_nbytes(self, slab: Slab) -> int:
        """The largest of its `block_ranges`, without listing them: a long pull from several ranks
        has thousands."""
        longest = max(run.num_blocks for run in self.runs)
        return max(s.nbytes * (longest if _are_whole(slab, s) else 1) for s in self.sources)

    def stamp_ranges(self, address: int) -> list[ByteRange]:
        """The byte ranges to copy from the stamp table of `peer` to a table at `address`."""
        stamps, nbytes = self.peer.stamps_address, GENERATION_NBYTES
        return [
            ByteRange(
                address + run.local_block * nbytes,
                stamps + run.source_block * nbytes,
                run.num_blocks * nbytes,
            )
            for run in self.runs
        ]

    @property
    def agents(self) -> tuple[Peer, ...]:
        """The agents to which it needs connections."""
        return _agents(self.peer, self.sources)

    def is_unchanged(self, generations: Sequence[int]) -> bool:
        """Whether the stamps read after the copy, indexed by local block, equal the ticket's."""
        blocks, expected = self.local_blocks, self.generations
        return all(generations[b] == e for b, e in zip(blocks, expected, strict=True))


class _Known(NamedTuple):
    peer: Peer
    sources: tuple[Source, ...]


class Change(NamedTuple):
    """The changes of connections after a peer was added.

    ranks: the peer's first rank, and its ranks from which this slab pulls.
    gone: ranks of peers that are forgotten because of it.
    is_new: it was not known, or was another.
    """

    ranks: tuple[Peer, ...]
    gone: tuple[Peer, ...]
    is_new: bool


class PullBook:
    """Checks and records the pulls into one slab. Bounded in peers and tickets.

    Args:
        transport: the name that peers must have in `Peer.transport`.
    """

    def __init__(self, slab: Slab, transport: str) -> None:
        self._slab = slab
        self._transport = transport
        self._peers: dict[str, _Known] = {}  # least recently used first
        self._used: dict[TicketName, None] = {}  # oldest first
        self._filling: set[int] = set()  # local blocks that a transport may still write
        self._pull_ids = itertools.count(1)

    @property
    def num_blocks_filling(self) -> int:
        return len(self._filling)

    def add_peer(self, peer: Peer) -> Change:
        """Add `peer`, if it is not known.

        All ranks of a worker are told of new peers and of pulls, so they forget the same ones.

        Raises:
            TransferFailed: the peer cannot be pulled from; the message says why.
        """
        before = self._peers.get(peer.worker_id)
        if before is not None and before.peer == peer:
            return Change(_agents(*before), (), False)
        known = _Known(peer, self._check_peer(peer))
        self._peers.pop(peer.worker_id, None)
        self._peers[peer.worker_id] = known
        gone = [] if before is None else [before]
        while len(self._peers) > MAX_PEERS:
            gone.append(self._peers.pop(next(iter(self._peers))))
        forgotten = tuple(rank for each in gone for rank in _agents(*each))
        return Change(_agents(*known), forgotten, True)

    def forget_peer(self, worker_id: str) -> tuple[Peer, ...]:
        """Drop a peer. Returns its first rank, and those from which this slab pulled."""
        known = self._peers.pop(worker_id, None)
        return () if known is None else _agents(*known)

    def peer_of(self, ticket: KVTicket) -> Peer | None:
        """The source of a ticket, if it is known and still the process that issued it."""
        known = self._peers.get(ticket.source_id)
        return known.peer if known is not None and known.peer.epoch == ticket.epoch else None

    def begin(
        self,
        ticket: KVTicket,
        first_block: int,
        into: Sequence[int],
        now: float,
        releases: bool = True,
    ) -> Pull:
        """Check a pull of `ticket.block_ids[first_block:]` into the local blocks `into`.

        From here to `end` the blocks `into` belong to the transport, and the ticket is used.

        Raises:
            TransferFailed: the pull is not valid; nothing changed.
        """
        peer, sources = self._check_ticket(ticket)
        source_blocks = ticket.block_ids[first_block:]
        if not 0 <= first_block <= len(ticket.block_ids) or len(source_blocks) != len(into):
            raise TransferFailed(
                f"ticket {ticket.ticket_id} names {len(ticket.block_ids)} blocks; from block"
                f" {first_block} on they do not match {len(into)} blocks here"
            )
        check_block_ids(into, self._slab.num_blocks, "the slab here")
        check_block_ids(source_blocks, peer.num_blocks, f"the slab of {peer.worker_id}")
        if not self._filling.isdisjoint(into):
            raise TransferFailed("a block here is still being filled by another pull")
        self._filling.update(into)
        self.mark_used(ticket)
        self._peers[peer.worker_id] = self._peers.pop(peer.worker_id)
        return Pull(
            pull_id=next(self._pull_ids),
            ticket=ticket,
            peer=peer,
            sources=sources,
            runs=tuple(merge_runs(zip(source_blocks, into, strict=True))),
            local_blocks=tuple(into),
            generations=ticket.generations[first_block:],
            started_at=now,
            releases=releases,
        )

    def end(self, pull: Pull) -> None:
        """End a pull: the transport does not touch its local blocks any more."""
        self._filling.difference_update(pull.local_blocks)

    def mark_used(self, ticket: KVTicket) -> None:
        self._used[_name(ticket)] = None
        while len(self._used) > MAX_USED_TICKETS:
            del self._used[next(iter(self._used))]

    def _check_peer(self, peer: Peer) -> tuple[Source, ...]:
        slab, name = self._slab, f"worker {peer.worker_id}"
        own = slab.layout, whole_nbytes(slab)
        if peer.transport != self._transport:
            raise TransferFailed(
                f"{name} moves KV with {peer.transport!r}, this worker with {self._transport!r};"
                " give both the same transport"
            )
        for rank in (peer, *peer.ranks):
            if (rank.layout, whole_nbytes(rank)) != own:
                raise TransferFailed(
                    f"{name} stores KV as {rank.layout!r} in blocks of {whole_nbytes(rank)} bytes,"
                    f" this worker as {slab.layout!r} in blocks of {whole_nbytes(slab)} bytes; both"
                    " must run the same model, dtype, block size and version"
                )
            if not _can_be(rank) or rank.num_blocks != peer.num_blocks:
                raise TransferFailed(f"{name} describes its slab in numbers that cannot be: {rank}")
        return sources_of(slab, peer)

    def _check_ticket(self, ticket: KVTicket) -> _Known:
        known = self._peers.get(ticket.source_id)
        if known is None:
            raise TransferFailed(f"worker {ticket.source_id} is not known here; add it as a peer")
        peer = known.peer
        if ticket.epoch != peer.epoch:
            raise TransferFailed(
                f"ticket {ticket.ticket_id} is of epoch {ticket.epoch} of worker"
                f" {ticket.source_id}, which is in epoch {peer.epoch} now"
            )
        if ticket.layout != peer.layout:
            raise TransferFailed(
                f"ticket {ticket.ticket_id} is for layout {ticket.layout!r}, worker"
                f" {ticket.source_id} has {peer.layout!r}"
            )
        if len(ticket.generations) != len(ticket.block_ids):
            raise TransferFailed(
                f"ticket {ticket.ticket_id} names {len(ticket.block_ids)} blocks but"
                f" {len(ticket.generations)} generations"
            )
        if not 0 < len(ticket.ticket_id.encode()) <= MAX_TICKET_ID_NBYTES:
            raise TransferFailed(f"ticket ids have 1 to {MAX_TICKET_ID_NBYTES} bytes")
        if _name(ticket) in self._used:
            raise TransferFailed(f"ticket {ticket.ticket_id} was used already")
        return known


def _agents(peer: Peer, sources: Sequence[Source]) -> tuple[Peer, ...]:
    ranks = (source.rank for source in sources)
    return peer, *(rank for rank in ranks if rank.worker_id != peer.worker_id)


def _can_be(peer: Peer) -> bool:
    """Whether the numbers of a slab make sense."""
    table_end = peer.stamps_address + peer.num_blocks * GENERATION_NBYTES
    slab_end = peer.base_address + peer.num_blocks * peer.block_nbytes
    return (
        peer.worker_id != ""
        and min(peer.num_blocks, peer.block_nbytes, peer.base_address, peer.stamps_address) > 0
        and max(table_end, slab_end) < 1 << 64
        and peer.stamps_address % GENERATION_NBYTES == 0
    )


def _name(ticket: KVTicket) -> TicketName:
    return ticket.source_id, ticket.epoch, ticket.ticket_id


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


def _are_whole(slab: Slab, source: Source) -> bool:
    """Whether the bytes of a source are whole blocks of both slabs, so that runs are copied."""
    return slab.block_nbytes == source.nbytes == source.rank.block_nbytes
