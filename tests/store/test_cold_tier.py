"""The tier's promises: never wait, never grow, never return what was not put."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest

from disagg.blocks import BlockHash
from disagg.errors import Unavailable
from disagg.messages import StoreCounts
from disagg.store import cold_tier
from disagg.store.cold_tier import (
    STORE_ID,
    ColdStore,
    ColdTier,
    Put,
    StoreThread,
)
from disagg.time_model import TransferTimeModel
from tests.store.fake_store import FakeStore
from tests.store.tiers import (
    NBYTES,
    Gate,
    Opener,
    block,
    fetched,
    finish,
    keep,
    name,
    names,
    offer,
    one_second_a_block,
    settle,
)
from tests.waiting import wait_until


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def new_tier() -> Iterator[Callable[..., ColdTier]]:
    tiers: list[ColdTier] = []

    def new(
        store: ColdStore,
        *,
        times: TransferTimeModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_queued: int = 100,
        num_fetched: int = 100,
    ) -> ColdTier:
        thread = StoreThread(store, NBYTES, clock)
        tier = ColdTier(thread, times or one_second_a_block(), clock)
        tier._num_queueable, tier._num_fetchable = num_queued, num_fetched
        tiers.append(tier)
        return tier

    yield new
    for tier in tiers:
        assert tier.close(timeout_s=60)


def known(tier: ColdTier, *numbers: int) -> list[bool]:
    """Which blocks the tier believes to be stored: it would not offer them again."""
    tier._take_done()
    return [name(number) in tier._known for number in numbers]


def test_offered_blocks_come_back_up_to_the_first_gap(new_tier: Opener) -> None:
    times, ticks = one_second_a_block(), count()
    tier = new_tier(FakeStore(1 << 20), times=times, clock=lambda: next(ticks) / 1024)
    assert all(offer(tier, i) for i in (0, 1, 3))
    settle(tier)
    fetch = tier.lookup(names(0, 1, 2, 3))
    assert not fetch.done
    finish(tier, fetch)
    assert fetch.blocks == [block(0), block(1)]
    assert (fetch.num_found, fetch.error) == (2, None)
    assert fetch.seconds > 0
    assert tier.counts() == StoreCounts(num_stored=3, num_hits=2, num_misses=2)
    (figure,) = times.figures()
    assert figure.source_id == STORE_ID
    assert tier.predicted_s(2) < 0.9 * 3.0  # it learns that this store is faster than that


def test_a_prefix_longer_than_one_call_is_loaded_in_order(
    new_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.store.cold_tier._CALL_NBYTES", 3 * NBYTES)
    gate = Gate()
    tier = new_tier(gate)
    keep(tier, *range(10))
    gate.calls.clear()
    fetch = fetched(tier, *range(10))
    assert fetch.blocks == [block(i) for i in range(10)]
    assert gate.calls == ["contains", "get", "get", "get", "get"]


def test_an_offer_never_waits_and_the_queue_is_bounded(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate, num_queued=5)
    gate.open.clear()
    taken = [offer(tier, i) for i in range(8)]
    assert taken == [True] * 5 + [False] * 3
    assert (tier.stats.num_dropped, tier.queued_nbytes) == (3, 5 * NBYTES)
    assert not tier.offer([(8, name(8))], lambda wanted: pytest.fail("it was read in vain"))
    gate.open.set()
    settle(tier)
    assert tier.stats.num_stored == 5
    assert offer(tier, 7)


@pytest.mark.parametrize("block_nbytes", [1 << 10, 21 << 20])
def test_the_queue_has_room_for_the_blocks_that_a_prompt_evicts(block_nbytes: int) -> None:
    """A block of 64 tokens of a 70B model has 21 MB."""
    tier = ColdTier(StoreThread(FakeStore(0), block_nbytes), TransferTimeModel())
    assert tier._num_queueable * block_nbytes == max(64 << 20, 64 * block_nbytes)
    assert tier._num_fetchable * block_nbytes == max(256 << 20, 128 * block_nbytes)
    assert tier.close(timeout_s=60)


def test_a_block_of_another_size_is_a_bug(new_tier: Opener) -> None:
    with pytest.raises(ValueError, match="1000 bytes"):
        new_tier(FakeStore(1 << 20)).offer([(0, name(0))], lambda wanted: [b"short"])


def test_a_value_of_another_size_is_a_miss(new_tier: Opener) -> None:
    store = FakeStore(1 << 20)
    store.put_many([(name(0), block(0)), (name(1), block(1)[:-1])])
    tier = new_tier(store)
    fetch = fetched(tier, 0, 1)
    assert fetch.blocks == [block(0)]


def test_a_block_evicted_between_question_and_load_ends_the_run(new_tier: Opener) -> None:
    class Forgetful(FakeStore):
        def contains(self, keys: Sequence[BlockHash]) -> list[bool]:
            return [True] * len(keys)

    store = Forgetful(1 << 20)
    store.put_many([(name(0), block(0)), (name(2), block(2))])
    fetch = (tier := new_tier(store)).lookup(names(0, 1, 2))
    finish(tier, fetch)
    assert (fetch.blocks, fetch.num_found) == ([block(0)], 1)


def test_fetches_go_before_puts(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate)
    gate.open.clear()
    offer(tier, 0)
    assert gate.entered.acquire(timeout=30)
    for i in range(1, 9):
        offer(tier, i)
    fetch = tier.lookup(names(20))
    gate.open.set()
    finish(tier, fetch)
    settle(tier)
    assert gate.calls == ["put", "contains", "put"]


def test_bytes_that_were_put_are_let_go_before_anybody_looks(gate: Gate) -> None:
    thread = StoreThread(gate, NBYTES)
    put = Put(name(0), block(0), 0)
    thread.put([put])
    assert thread.close(60.0)
    assert thread.take_done() == [put] and put.block == b"" and put.error is None


def test_known_blocks_are_not_stored_twice(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate)
    keep(tier, 0, 1)
    calls = list(gate.calls)
    assert known(tier, 0, 1, 2) == [True, True, False]
    assert not offer(tier, 0)
    assert tier.stats.num_known == 1
    assert gate.calls == calls


def test_blocks_of_other_workers_are_found_and_then_known(new_tier: Opener) -> None:
    store = FakeStore(1 << 20)
    store.put_many([(name(0), block(0))])
    tier = new_tier(store)
    assert known(tier, 0) == [False]
    fetch = fetched(tier, 0, 1)
    assert fetch.blocks == [block(0)]
    assert known(tier, 0, 1) == [True, False]


def test_what_the_store_lost_can_be_offered_again(new_tier: Opener) -> None:
    store = FakeStore(2 * NBYTES)
    tier = new_tier(store)
    keep(tier, 0)
    store.put_many([(name(8), block(8)), (name(9), block(9))])
    assert known(tier, 0) == [True]
    fetched(tier, 0)
    assert known(tier, 0) == [False]
    assert offer(tier, 0)


def test_the_names_it_knows_are_bounded(new_tier: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_tier, "_MAX_KNOWN", 3)
    tier = new_tier(FakeStore(1 << 20))
    keep(tier, *range(5))
    assert known(tier, *range(5)) == [False, False, True, True, True]


@pytest.mark.parametrize(("compute_s", "loads"), [(2.9, False), (3.1, True)])
def test_blocks_are_loaded_only_when_that_is_faster(
    new_tier: Opener, gate: Gate, compute_s: float, loads: bool
) -> None:
    tier = new_tier(gate)
    gate.store.put_many([(name(i), block(i)) for i in range(2)])
    assert tier.predicted_s(2) == 3.0
    asked: list[int] = []

    def computing(num_blocks: int) -> float:
        asked.append(num_blocks)
        return compute_s

    fetch = tier.lookup(names(0, 1, 2), computing)
    finish(tier, fetch)
    assert asked == [2]
    assert fetch.num_found == 2
    assert len(fetch.blocks) == (2 if loads else 0)
    assert ("get" in gate.calls) == loads


def test_a_slow_time_is_forgotten_when_nobody_looks() -> None:
    now_s = 0.0

    class Slow(FakeStore):
        def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
            nonlocal now_s
            now_s += 50.0
            return super().get_many(keys)

    store = Slow(1 << 20)
    store.put_many([(name(0), block(0))])
    tier = ColdTier(
        StoreThread(store, NBYTES, lambda: now_s), one_second_a_block(), clock=lambda: now_s
    )
    for _ in range(5):
        fetched(tier, 0)
    assert tier.predicted_s(1) > 20
    now_s += 61
    assert tier.predicted_s(1) == 2.0
    assert tier.close(timeout_s=60)


def test_a_fetch_is_cut_to_its_room_and_one_without_room_ends_at_once(
    new_tier: Opener, gate: Gate
) -> None:
    tier = new_tier(gate, num_fetched=4)
    gate.store.put_many([(name(i), block(i)) for i in range(6)])
    gate.open.clear()
    one, two, three = (tier.lookup(names(*range(n))) for n in (3, 6, 6))
    assert tier.poll() == [three] and three.error == "too many fetches at a time"
    gate.open.set()
    wait_until(lambda: len(gate.calls) == 4)
    finish(tier, one, two)
    assert [len(fetch.blocks) for fetch in (one, two, three)] == [3, 1, 0]
    assert tier.num_under_way == 0
    again = fetched(tier, 0, 1, 2, 3)
    assert len(again.blocks) == 4


def test_blocks_that_nobody_polled_take_room(new_tier: Opener) -> None:
    store = FakeStore(1 << 20)
    store.put_many([(name(i), block(i)) for i in range(2)])
    tier = new_tier(store, num_fetched=2)
    one = tier.lookup(names(0, 1))
    wait_until(lambda: not tier._thread._outbox.empty())
    two = tier.lookup(names(0, 1))
    assert tier.poll() == [one, two]
    assert (len(one.blocks), two.error) == (2, "too many fetches at a time")


def test_no_hashes_is_no_work(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate)
    fetch = tier.lookup([])
    assert tier.poll() == [fetch] and fetch.done and fetch.error is None
    assert gate.calls == []


def test_a_cancelled_fetch_ends_without_its_blocks(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate)
    gate.store.put_many([(name(0), block(0))])
    gate.open.clear()
    under_way, waiting = tier.lookup(names(0)), tier.lookup(names(0))
    assert gate.entered.acquire(timeout=30)
    tier.cancel(under_way)
    tier.cancel(waiting)
    gate.open.set()
    finish(tier, under_way, waiting)
    assert under_way.blocks == waiting.blocks == []
    assert gate.calls == ["contains"]


@pytest.mark.parametrize("error", [Unavailable("away"), RuntimeError("a bug")])
def test_a_failing_store_is_a_miss_and_counted(
    new_tier: Opener, gate: Gate, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    times = one_second_a_block()
    tier = new_tier(gate, times=times)
    keep(tier, 0)
    gate.error = error
    keep(tier, 1)
    assert known(tier, 0) == [False]  # it may come back empty
    fetch = fetched(tier, 0)
    assert fetch.blocks == [] and str(error) in (fetch.error or "")
    assert tier.counts() == StoreCounts(num_stored=1, num_failed=1, num_misses=1)
    (message,) = caplog.messages  # once, not with every failure
    assert str(error) in message
    assert times.figures() == ()
    gate.error = None
    wait_until(lambda: offer(tier, 2))
    settle(tier)
    again = fetched(tier, 0)
    assert again.blocks == [block(0)]


def test_a_store_that_is_away_is_asked_one_question_at_a_time(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate)
    gate.error = Unavailable("away")
    fetched(tier, 0)
    assert tier.is_away
    gate.open.clear()
    gate.calls.clear()
    for i in range(10):
        assert not offer(tier, i)
        tier.probe(name(i))
    assert tier.num_under_way == 1 and tier.stats.num_dropped == 10
    gate.error = None
    gate.open.set()
    wait_until(lambda: not tier.is_away)
    assert gate.calls == ["contains"]
    assert offer(tier, 0)


def test_a_cancelled_fetch_does_not_bring_a_store_back(new_tier: Opener, gate: Gate) -> None:
    tier = new_tier(gate)
    gate.open.clear()
    under_way, waiting = tier.lookup(names(0)), tier.lookup(names(1))
    gate.error = Unavailable("away")
    tier.cancel(waiting)
    gate.open.set()
    finish(tier, under_way, waiting)
    assert gate.calls == ["contains"] and tier.is_away


def test_close_stores_what_was_offered(gate: Gate) -> None:
    tier = ColdTier(StoreThread(gate, NBYTES), one_second_a_block())
    gate.open.clear()
    offer(tier, 0)
    assert gate.entered.acquire(timeout=30)
    for i in range(1, 4):
        offer(tier, i)
    gate.open.set()
    assert tier.close(timeout_s=60)
    assert gate.closed.is_set()
    assert all(gate.store.contains(names(*range(4))))
    assert tier.stats.num_stored == 4
    assert not offer(tier, 9)


def test_close_leaves_what_there_is_no_time_for(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.store.cold_tier._CALL_NBYTES", NBYTES)
    now_s = 0.0
    tier = ColdTier(
        StoreThread(gate, NBYTES, lambda: now_s), one_second_a_block(), clock=lambda: now_s
    )
    gate.open.clear()
    for i in range(5):
        offer(tier, i)
    assert not tier.close(timeout_s=0.05)
    now_s = 1.0
    gate.open.set()
    assert gate.closed.wait(120)
    assert gate.calls == ["put"]


def test_close_is_bounded_and_ends_every_fetch(gate: Gate) -> None:
    tier = ColdTier(StoreThread(gate, NBYTES), one_second_a_block())
    gate.open.clear()
    before = tier.lookup(names(0))
    assert not tier.close(timeout_s=0.05)
    after = tier.lookup(names(0))
    assert tier.poll() == [before, after]
    assert before.error == after.error == "the tier is closed"
    gate.open.set()
    assert gate.closed.wait(120)
    assert tier.poll() == []


def test_blocks_may_come_late_and_are_read_by_the_store_s_thread(new_tier: Opener) -> None:
    gate = Gate()
    tier = new_tier(gate)
    readers: list[str] = []

    def late(number: int) -> Callable[[], bytes]:
        def read() -> bytes:
            readers.append(threading.current_thread().name)
            return block(number)

        return read

    gate.open.clear()
    assert tier.offer(list(enumerate(names(1, 2))), lambda wanted: [late(1), late(2)]) == 2
    assert tier.queued_nbytes == 2 * NBYTES
    gate.open.set()
    settle(tier)
    assert set(readers) == {"cold-tier"} and len(readers) == 2
    assert gate.store.get_many(names(1, 2)) == [block(1), block(2)]


@pytest.mark.parametrize("fault", ["lost", "short"])
def test_a_late_block_that_cannot_be_read_is_only_missed(fault: str, new_tier: Opener) -> None:
    store = FakeStore(1 << 20)
    tier = new_tier(store)

    def late() -> bytes:
        if fault == "lost":
            raise RuntimeError("the device is lost")
        return b"short"

    tier.offer([(0, name(1))], lambda wanted: [late])
    settle(tier)
    assert tier.stats.num_failed == 1 and store.get_many(names(1)) == [None]
    wait_until(lambda: offer(tier, 2))  # the store is asked first whether it is there
    settle(tier)
    assert store.get_many(names(2)) == [block(2)]
