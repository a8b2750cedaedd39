"""A rank puts its parts of blocks as they are when it is told, and says what it could load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from disagg.rank_messages import (
    FromRank,
    PullBlocks,
    RankCopied,
    RankCopies,
    RankFetch,
    RankFetched,
    RankOffload,
    RankPut,
    RankStored,
    encode,
)
from disagg.store.store_thread import StoreThread
from disagg.worker import rank
from disagg.worker.rank_offload import Offload
from tests.engine.fake_runner import FakeKV
from tests.kvtransfer.memory import Memory
from tests.store.fake_store import FakeStore
from tests.store.test_host_tier import Copies
from tests.store.tiers import name, names, wait_until


class Part:
    """A rank's cache, with host memory and a store behind it."""

    def __init__(self) -> None:
        self.kv = FakeKV(8, 4)
        for block_id in range(8):
            self.kv.write_block(block_id, bytes([block_id]) * self.kv.block_nbytes)
        self.store, self.copies = FakeStore(1 << 20), Copies()
        self.sent: list[FromRank] = []
        self.thread = StoreThread(self.store, self.kv.block_nbytes, time.monotonic)
        self.offload = Offload(
            self.copies, self.thread, self.kv.read_blocks, self.kv.write_block, self.sent.append
        )

    def do(self, task: RankOffload) -> FromRank:
        """What it reports."""
        self.offload.begin(task)
        wait_until(self._has_ended)
        (sent,) = self.sent
        self.sent.clear()
        return sent

    def _has_ended(self) -> bool:
        self.offload.report()
        return not self.offload.is_busy


@pytest.fixture
def part() -> Iterator[Part]:
    part = Part()
    yield part
    assert part.thread.close(60.0)


def test_parts_that_were_put_are_loaded_into_other_blocks(part: Part) -> None:
    assert part.do(RankPut([(3, name(1)), (6, name(2))], False)) == RankStored([None, None])
    assert part.do(RankFetch(9, names(1, 2), [0, 5])) == RankFetched(9, None, 0)
    assert part.kv.read_blocks([0, 5]) == part.kv.read_blocks([3, 6])


def test_slots_are_put_from_host_memory(part: Part) -> None:
    nbytes = part.kv.block_nbytes
    part.copies.read_slot = lambda slot: bytes([100 + slot]) * nbytes  # type: ignore[method-assign]
    assert part.do(RankPut([(2, name(1))], True)) == RankStored([None])
    assert part.store.get_many(names(1)) == [bytes([102]) * nbytes]


def test_copies_to_host_memory_are_reported(part: Part) -> None:
    assert part.do(RankCopies(False, [(1, 2)])) == RankCopied(1, [])
    assert part.do(RankCopies(True, [(2, 1)])) == RankCopied(0, [0.002])


def test_what_is_not_complete_any_more_is_not_loaded(part: Part) -> None:
    part.do(RankPut([(3, name(1))], False))
    before = part.kv.read_blocks([0, 5])
    sent = part.do(RankFetch(9, names(1, 2), [0, 5]))
    assert sent == RankFetched(9, "the store has only 1 of 2 blocks left", 0)
    assert part.kv.read_blocks([0, 5]) == before


def test_a_store_that_fails_is_reported(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("away")

    monkeypatch.setattr(part.store, "put_many", fail)
    monkeypatch.setattr(part.store, "contains_prefix", fail)
    assert part.do(RankPut([(3, name(1))], False)) == RankStored(["OSError: away"])
    assert part.do(RankFetch(9, names(1), [0])) == RankFetched(9, "OSError: away", 0)


def test_a_block_is_read_for_the_store_before_a_pull_may_write_there(part: Part) -> None:
    """The first rank evicts a block, and then pulls into it: the pull runs in another thread."""
    order: list[str] = []
    read: Callable[[Sequence[int]], Sequence[bytes]] = part.kv.read_blocks

    def noted(block_ids: Sequence[int]) -> Sequence[bytes]:
        order.append("read")
        return read(block_ids)

    class Jobs(SimpleQueue[rank.Job]):
        def put(self, item: rank.Job, *arguments: object) -> None:
            order.append("pull")

    part.offload = Offload(None, part.thread, noted, part.kv.write_block, part.sent.append)
    first, other = Pipe()
    first.send_bytes(encode(RankPut([(3, name(1))], False)))
    first.send_bytes(encode(PullBlocks(1, Memory("source").ticket("t", [1]), 0, [3])))
    first.close()
    follower = SimpleNamespace()
    with pytest.raises(EOFError):
        rank._follow(other, follower, part.offload, Jobs())  # type: ignore[arg-type]
    assert order == ["read", "pull"]
