"""Ranks of a worker that are all in one process."""

from __future__ import annotations

from collections.abc import Callable

from disagg.kvtransfer.ranked_transport import RankedTransport
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, Transport
from tests.kvtransfer.memory import Memory, rank_memories


class FakeRank:
    """A rank in this process, whose pulls end when `poll` is allowed to see it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._numbers: dict[int, int] = {}
        self.is_slow = False

    @property
    def peer(self) -> Peer:
        return self._transport.peer

    def add_peer(self, peer: Peer) -> None:
        self._transport.add_peer(peer)

    def forget_peer(self, worker_id: str) -> None:
        self._transport.forget_peer(worker_id)

    def pull(self, number: int, ticket: KVTicket, first_block: int, into: list[int]) -> None:
        pull_id = self._transport.pull(ticket, first_block, into, releases=False)
        self._numbers[pull_id] = number

    def poll(self) -> list[tuple[int, PullDone]]:
        if self.is_slow:
            return []
        events = self._transport.poll()
        return [(self._numbers[e.pull_id], e) for e in events if isinstance(e, PullDone)]


class FakeWorker:
    """A worker of several ranks.

    Args:
        num_heads: into which a whole block can be divided.
    """

    def __init__(
        self,
        open_side: Callable[[Memory], Transport],
        name: str,
        num_ranks: int,
        num_heads: int = 8,
    ) -> None:
        self.memories = rank_memories(name, num_ranks, num_heads=num_heads)
        first, *others = map(open_side, self.memories)
        self.ranks = [FakeRank(each) for each in others]
        self.transport = RankedTransport(first, self.ranks)

    def ticket(self, ticket_id: str, block_ids: list[int]) -> KVTicket:
        return self.memories[0].ticket(ticket_id, block_ids)

    def reuse(self, block_id: int) -> None:
        self.memories[0].reuse(block_id)
        for each in self.memories[1:]:
            each.fill(block_id)

    def clear(self) -> None:
        for each in self.memories:
            each.clear()

    def holds_copy(
        self, source: Memory, ticket: KVTicket, into: list[int], *, first: int = 0
    ) -> bool:
        """Whether all ranks hold what they are to have of exactly these blocks."""
        others = [b for b in range(32) if b not in into]
        return all(
            each.holds_copy(source, ticket, into, first)
            and not any(any(each.read(block)) for block in others)
            for each in self.memories
        )
