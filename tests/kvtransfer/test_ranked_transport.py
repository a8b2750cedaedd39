"""Workers of two ranks: a pull is what all ranks pull, and ends when they have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.errors import TransferFailed
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.ranked_transport import RankedTransport
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from tests.kvtransfer.memory import LAYOUT, Memory
from tests.kvtransfer.test_local_transport import open_side


class FakeRank:
    """A rank in this process, whose pulls end when `poll` is allowed to see it."""

    def __init__(self, transport: LocalTransport) -> None:
        self._transport = transport
        self._numbers: dict[int, int] = {}
        self.is_slow = False

    @property
    def peer(self) -> Peer:
        return self._transport.peer

    def add_peer(self, peer: Peer) -> None:
        self._transport.add_peer(peer)

    def pull(self, number: int, ticket: KVTicket, first_block: int, into: list[int]) -> None:
        pull_id = self._transport.pull(ticket, first_block, into, releases=False)
        self._numbers[pull_id] = number

    def poll(self) -> list[tuple[int, PullDone]]:
        if self.is_slow:
            return []
        events = self._transport.poll()
        return [(self._numbers[e.pull_id], e) for e in events if isinstance(e, PullDone)]


class FakeWorker:
    """Two slabs with one table of stamps."""

    def __init__(self, fleet: LocalFleet, name: str) -> None:
        self.first = Memory(name, layout=f"{LAYOUT}:rank0of2")
        self.second = Memory(f"{name}.1", layout=f"{LAYOUT}:rank1of2")
        self.second.stamps = self.first.stamps
        for block_id in range(32):
            self.second.fill(block_id)
        self.rank = FakeRank(open_side(fleet, self.second))
        self.transport = RankedTransport(open_side(fleet, self.first), [self.rank])

    def ticket(self, ticket_id: str, block_ids: list[int]) -> KVTicket:
        return self.first.ticket(ticket_id, block_ids)

    def clear(self) -> None:
        self.first.clear()
        self.second.clear()


@pytest.fixture
def two() -> tuple[FakeWorker, FakeWorker]:
    fleet = LocalFleet()
    source, reader = FakeWorker(fleet, "source"), FakeWorker(fleet, "reader")
    reader.clear()
    reader.transport.add_peer(source.transport.peer)
    return source, reader


def test_a_pull_ends_when_the_last_rank_has_its_part(two: tuple[FakeWorker, FakeWorker]) -> None:
    source, reader = two
    ticket = source.ticket("t", [3, 4, 9])
    reader.rank.is_slow = True
    number = reader.transport.pull(ticket, 1, [0, 1])
    assert reader.transport.poll() == []
    assert source.transport.poll() == []  # its blocks are still needed
    reader.rank.is_slow = False
    (done,) = reader.transport.poll()
    assert isinstance(done, PullDone)
    assert (done.pull_id, done.error, done.num_blocks, done.nbytes) == (number, None, 2, 4 * 256)
    assert reader.first.holds_copy(source.first, ticket, [0, 1], first=1)
    assert reader.second.holds_copy(source.second, ticket, [0, 1], first=1)
    assert source.transport.poll() == [TicketReleased("t")]


def test_a_pull_fails_if_one_rank_does(two: tuple[FakeWorker, FakeWorker]) -> None:
    source, reader = two
    ticket = source.ticket("t", [3])
    reader.rank.is_slow = True
    reader.transport.pull(ticket, 0, [0])
    assert reader.transport.poll() == []  # the first rank has its part
    source.first.reuse(3)
    source.second.fill(3)
    reader.rank.is_slow = False
    (done,) = reader.transport.poll()
    assert isinstance(done, PullDone) and done.is_torn
    assert done.error is not None and "used the blocks again" in done.error
    assert source.transport.poll() == [TicketReleased("t")]


def test_workers_of_other_sizes_are_refused_in_words(two: tuple[FakeWorker, FakeWorker]) -> None:
    source, reader = two
    alone = replace(source.transport.peer, ranks=())
    with pytest.raises(TransferFailed, match="has 1 ranks, this worker has 2; KV moves between"):
        reader.transport.add_peer(alone)


def test_a_worker_of_one_rank_refuses_one_of_two(two: tuple[FakeWorker, FakeWorker]) -> None:
    source, _ = two
    alone = open_side(LocalFleet(), Memory("alone"))
    with pytest.raises(TransferFailed, match="rank0of2"):
        alone.add_peer(source.transport.peer)


def test_its_own_record_is_ignored(two: tuple[FakeWorker, FakeWorker]) -> None:
    _, reader = two
    reader.transport.add_peer(reader.transport.peer)
    with pytest.raises(TransferFailed, match="not known here"):
        reader.transport.pull(reader.ticket("t", [3]), 0, [0])
