"""A rank puts its parts of blocks as they are when it is told, and says what it could load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.rank_messages import (
    FromRank,
    PullBlocks,
    RankCopies,
    RankDone,
    RankFetch,
    RankMove,
    RankPut,
    encode,
)
from disagg.store.cold_tier import StoreThread
from disagg.worker.rank import Moves, follow
from tests.engine.fake_runner import FakeKV
from tests.kvtransfer.memory import Memory
from tests.store.fake_store import FakeStore
from tests.store.test_host_tier import Copies
from tests.store.tiers import name, names
from tests.waiting import wait_until


class Part:
    """A rank's cache, with host memory and a store behind it."""

    def __init__(self) -> None:
        self.kv = FakeKV(8, 4)
        for block_id in range(8):
            self.kv.write_block(block_id, bytes([block_id]) * self.kv.block_nbytes)
        self.store, self.copies = FakeStore(1 << 20), Copies()
        self.sent: list[FromRank] = []
        self.thread = StoreThread(self.store, self.kv.block_nbytes, time.monotonic)
        memory = Memory("reader.1")
        self.moves = Moves(
            LocalTransport(LocalFleet(), memory.slab, memory.stamps, clock=lambda: 0.0),
            self.copies,
            self.thread,
            self.kv.read_blocks,
            self.kv.write_block,
            self.sent.append,
        )

    def do(self, task: RankMove) -> FromRank:
        """What it reports."""
        self.moves.begin(task)
        wait_until(self._has_ended)
        (sent,) = self.sent
        self.sent.clear()
        return sent

    def _has_ended(self) -> bool:
        self.moves.report()
        return not self.moves.is_busy


@pytest.fixture
def part() -> Iterator[Part]:
    part = Part()
    yield part
    assert part.thread.close(60.0)


def test_parts_that_were_put_are_loaded_into_other_blocks(part: Part) -> None:
    assert part.do(RankPut(7, [(3, name(1)), (6, name(2))], False)) == RankDone(7)
    assert part.do(RankFetch(9, names(1, 2), [0, 5])) == RankDone(9)
    assert part.kv.read_blocks([0, 5]) == part.kv.read_blocks([3, 6])


def test_slots_are_put_from_host_memory(part: Part) -> None:
    nbytes = part.kv.block_nbytes
    part.copies.read_slot = lambda slot: bytes([100 + slot]) * nbytes  # type: ignore[method-assign]
    assert part.do(RankPut(7, [(2, name(1))], True)) == RankDone(7)
    assert part.store.get_many(names(1)) == [bytes([102]) * nbytes]


def test_copies_to_host_memory_are_reported(part: Part) -> None:
    assert part.do(RankCopies(7, False, [(1, 2)])) == RankDone(7)
    assert part.do(RankCopies(7, True, [(2, 1)])) == RankDone(7, seconds=0.002)


def test_what_is_not_complete_any_more_is_not_loaded(part: Part) -> None:
    part.do(RankPut(7, [(3, name(1))], False))
    before = part.kv.read_blocks([0, 5])
    sent = part.do(RankFetch(9, names(1, 2), [0, 5]))
    assert sent == RankDone(9, "the store has only 1 of 2 blocks left")
    assert part.kv.read_blocks([0, 5]) == before


def test_a_store_that_fails_is_reported(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("away")

    monkeypatch.setattr(part.store, "put_many", fail)
    monkeypatch.setattr(part.store, "contains", fail)
    assert part.do(RankPut(7, [(3, name(1))], False)) == RankDone(7, "OSError: away")
    assert part.do(RankFetch(9, names(1), [0])) == RankDone(9, "OSError: away")


def test_a_block_is_read_for_the_store_before_a_pull_may_write_there(part: Part) -> None:
    """The first rank evicts a block, and then pulls into it: the pull runs in another thread."""
    order: list[str] = []
    read: Callable[[Sequence[int]], Sequence[bytes]] = part.kv.read_blocks

    def noted(block_ids: Sequence[int]) -> Sequence[bytes]:
        order.append("read")
        return read(block_ids)

    class Transport(LocalTransport):
        def pull(self, *arguments: Any, **options: Any) -> int:
            order.append("pull")
            return 1

    memory = Memory("reader.1")
    transport = Transport(LocalFleet(), memory.slab, memory.stamps, clock=lambda: 0.0)
    moves = Moves(transport, None, part.thread, noted, part.kv.write_block, part.sent.append)
    first, other = Pipe()
    first.send_bytes(encode(RankPut(7, [(3, name(1))], False)))
    first.send_bytes(encode(PullBlocks(1, Memory("source").ticket("t", [1]), 0, [3])))
    first.close()
    follow(other, SimpleNamespace(), moves)  # type: ignore[arg-type]
    assert order == ["read", "pull"]
