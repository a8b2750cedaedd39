"""The twin of `nixl_transport` for workers in one process: same checks, same events, a plain copy.

For tests, the simulator and `local.py`. Every side is given the same `LocalFleet`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from disagg.errors import StartupError
from disagg.kvtransfer.pulls import Pull, PullBook, Source, describe
from disagg.kvtransfer.slab import GENERATION_NBYTES, HOST, Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased

TRANSPORT = "local"


@runtime_checkable
class DeviceMemory(Protocol):
    """Memory of blocks that the host cannot address; it owns a slab on a device."""

    def copy_blocks(self, first: int, source: object, source_first: int, num_blocks: int) -> None:
        """Copy neighbouring blocks of another owner of its kind; returns when they are here."""
        ...


class LocalFleet:
    """The open transports of one process, by (worker id, epoch)."""

    def __init__(self) -> None:
        self.sides: dict[tuple[str, int], LocalTransport] = {}


class LocalTransport:
    """One worker's side. A pull is carried out by the next `poll`.

    Args:
        fleet: shared by all transports that should reach each other.
        stamps: the generations of `slab`, bumped by its owner.
        clock: seconds, for `PullDone.seconds`.

    Raises:
        StartupError: the slab is on a device, and its owner cannot copy its blocks, or has a part
            of them; or this worker's epoch is open already.
    """

    def __init__(
        self, fleet: LocalFleet, slab: Slab, stamps: Stamps, *, clock: Callable[[], float]
    ) -> None:
        if slab.device_id != HOST and (slab.part or not isinstance(slab.owner, DeviceMemory)):
            raise StartupError("the local transport cannot copy this slab's memory; use nixl")
        self._peer = describe(TRANSPORT, slab, stamps)
        name = self._peer.worker_id, self._peer.epoch
        if name in fleet.sides:
            raise StartupError(f"worker {name[0]} of epoch {name[1]} has a local side already")
        self._fleet = fleet
        self._slab = slab
        self._stamps = stamps
        self._clock = clock
        self._book = PullBook(slab, TRANSPORT)
        self._pulls: list[Pull] = []
        self._scratch = array("Q", bytes(slab.num_blocks * GENERATION_NBYTES))
        self._inbox: deque[str] = deque()  # other sides' threads append
        fleet.sides[name] = self

    @property
    def peer(self) -> Peer:
        return self._peer

    def add_peer(self, peer: Peer) -> bool:
        return peer.worker_id != self._peer.worker_id and self._book.add_peer(peer).is_new

    def forget_peer(self, worker_id: str) -> None:
        self._book.forget_peer(worker_id)

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        pull = self._book.begin(ticket, first_block, into, self._clock(), releases)
        self._pulls.append(pull)
        return pull.pull_id

    def release(self, ticket: KVTicket) -> None:
        self._book.mark_used(ticket)
        peer = self._book.peer_of(ticket)
        if peer is not None:
            self._notify(peer, ticket.ticket_id)

    def poll(self) -> list[PullDone | TicketReleased]:
        events: list[PullDone | TicketReleased] = []
        while self._inbox:
            events.append(TicketReleased(self._inbox.popleft()))
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            error, is_torn = self._carry_out(pull)
            self._book.end(pull)
            if pull.releases:
                self._notify(pull.peer, pull.ticket.ticket_id)
            seconds = self._clock() - pull.started_at
            size = (pull.num_blocks, pull.nbytes)
            events.append(PullDone(pull.pull_id, error, *size, seconds, is_torn=is_torn))
        return events

    def close(self) -> None:
        self._fleet.sides.pop((self._peer.worker_id, self._peer.epoch), None)
        for pull in self._pulls:
            self._book.end(pull)
        self._pulls.clear()

    def _carry_out(self, pull: Pull) -> tuple[str | None, bool]:
        """Copy, then compare the stamps. Returns the error, and whether the stamps had changed."""
        for source in pull.sources:
            side = self._fleet.sides.get((source.rank.worker_id, source.rank.epoch))
            if side is None or side.peer != source.rank:
                return _gone(pull.peer), False
            self._copy_blocks(pull, source, side)
        first = self._fleet.sides.get((pull.peer.worker_id, pull.peer.epoch))
        if first is None:
            return _gone(pull.peer), False
        self._copy_generations(pull, first)
        if not pull.is_unchanged(self._scratch):
            why = f"worker {pull.peer.worker_id} used the blocks again while they were copied"
            return why, True
        return None, False

    def _copy_blocks(self, pull: Pull, source: Source, side: LocalTransport) -> None:
        memory = self._slab.owner
        if self._slab.device_id != HOST and isinstance(memory, DeviceMemory):
            for run in pull.runs:
                memory.copy_blocks(
                    run.local_block, side._slab.owner, run.source_block, run.num_blocks
                )
            return
        for piece in pull.block_ranges(self._slab, source):
            ctypes.memmove(*piece)

    def _copy_generations(self, pull: Pull, side: LocalTransport) -> None:
        for run in pull.runs:
            end = run.source_block + run.num_blocks
            self._scratch[run.local_block : run.local_block + run.num_blocks] = (
                side._stamps.generations[run.source_block : end]
            )

    def _notify(self, peer: Peer, ticket_id: str) -> None:
        source = self._fleet.sides.get((peer.worker_id, peer.epoch))
        if source is not None:
            source._inbox.append(ticket_id)


def _gone(peer: Peer) -> str:
    return f"worker {peer.worker_id} of epoch {peer.epoch} is gone"
