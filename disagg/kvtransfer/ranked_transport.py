"""The transport of a worker with several ranks, each of which moves its part of every block.

Each rank pulls what it needs from the ranks of the source that have it (`sources.sources_of`), so
workers may have different numbers of ranks. The first rank issues and checks tickets. Its stamps
are valid for all ranks, because it bumps a block's stamp before it tells any rank to write to the
block. So a reader compares the stamps of the first rank, whichever rank it copied from. A pull
succeeds if it succeeds on all ranks, and the source is notified when it has ended on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from disagg.kvtransfer.pulls import MAX_PEERS
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased, Transport


class RankTransport(Protocol):
    """The transport of another rank; no method blocks."""

    @property
    def peer(self) -> Peer:
        """The record by which other workers reach that rank's slab."""
        ...

    def add_peer(self, peer: Peer) -> None:
        """As `Transport.add_peer`, but refusals are logged there."""
        ...

    def forget_peer(self, worker_id: str) -> None:
        """As `Transport.forget_peer`."""
        ...

    def pull(self, number: int, ticket: KVTicket, first_block: int, into: list[int]) -> None:
        """As `Transport.pull`, but refusals are reported by `poll`; the source is not told."""
        ...

    def poll(self) -> list[tuple[int, PullDone]]:
        """The pulls that ended since the last call, by number."""
        ...


class _Parts:
    """A pull that runs on all ranks."""

    def __init__(self, ticket: KVTicket, num_ranks: int, releases: bool) -> None:
        self.ticket = ticket
        self.releases = releases
        self.num_running = num_ranks
        self.ended: list[PullDone] = []

    def total(self) -> PullDone:
        """Bytes of all ranks, in the time of the slowest; the first error."""
        first = self.ended[0]
        error = next((each.error for each in self.ended if each.error is not None), None)
        return replace(
            first,
            error=error,
            nbytes=sum(each.nbytes for each in self.ended),
            seconds=max(each.seconds for each in self.ended),
            is_torn=any(each.is_torn for each in self.ended),
        )


class RankedTransport:
    """Implements `Transport`; a pull has the id of the first rank's part.

    Args:
        own: of the first rank.
        others: of the other ranks, in order.
    """

    def __init__(self, own: Transport, others: Sequence[RankTransport]) -> None:
        self._own = own
        self._others = others
        self._peer = replace(own.peer, ranks=tuple(each.peer for each in others))
        self._pulls: dict[int, _Parts] = {}
        # What the other ranks know, in the order of their `PullBook`s: each route that moves KV has
        # its source added, and would else be a message of some KB to each rank.
        self._known: dict[str, Peer] = {}

    @property
    def peer(self) -> Peer:
        return self._peer

    def add_peer(self, peer: Peer) -> None:
        if peer.worker_id == self._peer.worker_id:
            return
        self._own.add_peer(peer)
        if self._known.get(peer.worker_id) == peer:
            return
        self._known.pop(peer.worker_id, None)
        self._known[peer.worker_id] = peer
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]
        for rank in self._others:
            rank.add_peer(peer)

    def forget_peer(self, worker_id: str) -> None:
        self._own.forget_peer(worker_id)
        if self._known.pop(worker_id, None) is not None:
            for rank in self._others:
                rank.forget_peer(worker_id)

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        number = self._own.pull(ticket, first_block, into, releases=False)  # refuses what is wrong
        self._pulls[number] = _Parts(ticket, 1 + len(self._others), releases)
        if known := self._known.pop(ticket.source_id, None):
            self._known[ticket.source_id] = known
        for rank in self._others:
            rank.pull(number, ticket, first_block, into)
        return number

    def release(self, ticket: KVTicket) -> None:
        self._own.release(ticket)

    def poll(self) -> list[PullDone | TicketReleased]:
        events: list[PullDone | TicketReleased] = []
        for event in self._own.poll():
            if isinstance(event, PullDone):
                events += self._ended(event.pull_id, event)
            else:
                events.append(event)
        if self._pulls:
            for rank in self._others:
                for number, done in rank.poll():
                    events += self._ended(number, replace(done, pull_id=number))
        return events

    def close(self) -> None:
        self._own.close()

    def _ended(self, number: int, done: PullDone) -> list[PullDone]:
        """What is to be reported once a rank's part of a pull has ended."""
        parts = self._pulls[number]
        parts.ended.append(done)
        parts.num_running -= 1
        if parts.num_running:
            return []
        del self._pulls[number]
        if parts.releases:
            self._own.release(parts.ticket)
        return [parts.total()]
