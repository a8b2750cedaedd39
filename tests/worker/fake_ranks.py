"""Ranks of a worker that are all in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, Transport
from disagg.rank_messages import (
    ConnectPeer,
    ForgetPeer,
    PullBlocks,
    RankDone,
    RankTask,
    decode_task,
)
from disagg.worker.ranked import RankedTransport, RankTasks
from tests.kvtransfer.memory import Memory, rank_memories


class FakeRank:
    """A rank in this process, in the place of `other_rank.Rank`.

    It pulls over its transport, if it has one. Its other tasks end when a test says so.

    told: what it was told.
    is_slow: it reports nothing for now.
    waited: called by `wait`.
    num_asked: how often it was asked for reports.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport
        self._numbers: dict[int, int] = {}
        self._reports: list[RankDone] = []
        self.told: list[RankTask] = []
        self.is_slow = self.is_gone = False
        self.num_damaged = self.num_asked = 0
        self.waited: Callable[[], object] = lambda: None

    @property
    def peer(self) -> Peer:
        return Memory("rank").peer() if self._transport is None else self._transport.peer

    def tell(self, frame: bytes) -> None:
        task = decode_task(frame)
        self.told.append(task)
        match task:
            case _ if self._transport is None:
                pass
            case ConnectPeer(peer=peer):
                self._transport.add_peer(peer)
            case ForgetPeer(worker_id=worker_id):
                self._transport.forget_peer(worker_id)
            case PullBlocks(number=number, ticket=ticket, first_block=first_block, into=into):
                pull_id = self._transport.pull(ticket, first_block, into, releases=False)
                self._numbers[pull_id] = number

    def end(self, number: int, error: str | None = None, seconds: float = 0.0) -> None:
        self._reports.append(RankDone(number, error, seconds))

    def take_reports(self) -> list[RankDone]:
        self.num_asked += 1
        if self.is_slow:
            return []
        for event in [] if self._transport is None else self._transport.poll():
            if isinstance(event, PullDone):
                self._reports.append(RankDone.of_pull(self._numbers[event.pull_id], event))
        reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> bool:
        self.waited()
        return not self.is_gone


def tasks_of(ranks: Sequence[FakeRank]) -> RankTasks:
    return RankTasks(cast(Any, ranks))


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
        self.transport = RankedTransport(first, tasks_of(self.ranks))

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
