"""Copies, puts and fetches of a worker with several ranks have ended when they have on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from disagg.rank_messages import RankCopies, RankFetch, RankPut
from disagg.store.cold_tier import ColdTier
from disagg.worker.ranked import RankedCopier, RankedFetches, RankedStoreThread
from tests.store.fake_store import FakeStore
from tests.store.tiers import NBYTES, block, name, names, offer, one_second_a_block
from tests.waiting import wait_until
from tests.worker.fake_ranks import FakeRank, tasks_of


class FakeCopier:
    """Ends what the test says, and remembers what it was told.

    num_saved, loaded_s: what has ended and was not reported.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[bool, list[tuple[int, int]]]] = []
        self.num_saved = 0
        self.loaded_s: list[float] = []
        self.is_closed = False

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append((False, [*pairs]))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append((True, [*pairs]))

    def take_saved(self) -> int:
        num_saved, self.num_saved = self.num_saved, 0
        return num_saved

    def take_loaded(self) -> list[float]:
        loaded_s, self.loaded_s = self.loaded_s, []
        return loaded_s

    def read_slot(self, slot: int) -> bytes:
        return f"own {slot}".encode()

    def close(self) -> None:
        self.is_closed = True


def test_every_rank_copies_the_same_blocks_and_all_end_with_the_last() -> None:
    own, ranks = FakeCopier(), [FakeRank(), FakeRank()]
    copier = RankedCopier(own, tasks_of(ranks))
    copier.save([(1, 2), (3, 4)])
    copier.load([(2, 5)])
    copier.save([(6, 7)])
    copier.load([(2, 6)])
    for rank in ranks:
        told = [task for task in rank.told if isinstance(task, RankCopies)]
        assert [(task.is_load, task.pairs) for task in told] == own.calls
    first, load, second, last = (task.number for task in told)

    own.num_saved = 2
    ranks[0].end(first)
    assert copier.take_saved() == 0
    for rank, number in ((ranks[1], first), (ranks[1], second)):
        rank.end(number)
    assert copier.take_saved() == 1
    ranks[0].end(second)
    assert (copier.take_saved(), copier.take_saved()) == (1, 0)

    ranks[0].end(load, seconds=0.25)
    ranks[0].end(last, seconds=0.5)
    ranks[1].end(load)
    assert copier.take_loaded() == []
    own.loaded_s = [0.5]
    assert copier.take_loaded() == [0.5], "the slowest one's"
    ranks[1].end(last)
    own.loaded_s = [0.125]
    assert copier.take_loaded() == [0.5]
    assert copier.take_loaded() == []
    assert copier.read_slot(3) == b"own 3"
    copier.close()
    assert own.is_closed


def known(tier: ColdTier) -> list[bytes]:
    """What it would not store again."""
    tier.poll()
    return [*tier._known]


@pytest.fixture
def ranks() -> list[FakeRank]:
    return [FakeRank(), FakeRank()]


@pytest.fixture
def tier(ranks: list[FakeRank]) -> Iterator[ColdTier]:
    thread = RankedStoreThread(FakeStore(1 << 20), NBYTES, tasks_of(ranks))
    tier = ColdTier(thread, one_second_a_block())
    tier._num_queueable = 3
    yield tier
    tier.close(0.0)


def puts_of(rank: FakeRank) -> list[RankPut]:
    return [task for task in rank.told if isinstance(task, RankPut)]


def put_here(tier: ColdTier) -> None:
    """Wait until the first rank has put its parts."""

    def is_put() -> bool:
        tier.poll()
        running = tier._thread._tasks._running.values()  # type: ignore[attr-defined]
        return not any(task.num_own for task in running)

    wait_until(is_put)


def test_blocks_are_stored_when_all_ranks_have_put_their_parts(
    tier: ColdTier, ranks: list[FakeRank]
) -> None:
    blocks = [(4, name(1)), (2, name(2))]
    assert tier.offer(blocks, lambda numbers: [block(1), block(2)], in_host=True) == 2
    for rank in ranks:
        (put,) = puts_of(rank)
        assert (put.blocks, put.in_host) == (blocks, True)
    put_here(tier)
    assert known(tier) == [] and tier.queued_nbytes == 2 * NBYTES
    ranks[0].end(put.number)
    assert known(tier) == []
    ranks[1].end(put.number)
    assert known(tier) == names(1, 2)
    assert (tier.stats.num_stored, tier.queued_nbytes) == (2, 0)


def test_a_block_that_one_rank_could_not_put_is_not_stored(
    tier: ColdTier, ranks: list[FakeRank]
) -> None:
    tier.offer([(0, name(1))], lambda numbers: [block(1)])
    put_here(tier)
    ranks[0].end(puts_of(ranks[0])[0].number)
    ranks[1].end(puts_of(ranks[1])[0].number, "Redis did not answer.")
    assert known(tier) == [] and tier.is_away
    assert (tier.stats.num_stored, tier.stats.num_failed) == (0, 1)


def test_the_slowest_rank_bounds_the_queue(tier: ColdTier, ranks: list[FakeRank]) -> None:
    assert [offer(tier, i) for i in range(4)] == [True, True, True, False]
    put_here(tier)
    assert not offer(tier, 4)
    assert [len(rank.told) for rank in ranks] == [3, 3], "what is not taken is not read"
    for rank in ranks:
        rank.end(puts_of(rank)[0].number)
    assert offer(tier, 5) and not offer(tier, 6)


def test_ranks_are_asked_once_for_blocks_that_are_evicted_together(
    tier: ColdTier, ranks: list[FakeRank]
) -> None:
    """A system call for each block and rank took 4 ms of a step that evicts 256 on 8 ranks."""
    blocks = [(i, name(i)) for i in range(100)]
    for _ in range(2):
        tier.offer(blocks, lambda numbers: [block(i) for i in numbers])
    assert all(rank.num_asked <= 2 and len(rank.told) == 1 for rank in ranks)


def end_next_put(rank: FakeRank) -> Callable[[], None]:
    left = iter(range(10))
    return lambda: rank.end(puts_of(rank)[next(left)].number)


def test_a_tier_that_closes_waits_for_the_parts_of_all_ranks(
    tier: ColdTier, ranks: list[FakeRank]
) -> None:
    for rank in ranks:
        rank.waited = end_next_put(rank)
    offer(tier, 0)
    offer(tier, 1)
    assert tier.close(60.0)
    assert tier.stats.num_stored == 2


def test_a_tier_closes_without_a_rank_that_is_gone(tier: ColdTier, ranks: list[FakeRank]) -> None:
    ranks[0].is_gone, looks = True, list[None]()
    ranks[0].waited = lambda: looks.append(None)
    ranks[1].waited = end_next_put(ranks[1])
    offer(tier, 0)
    assert tier.close(60.0) and looks == [None], "it was looked at again"
    assert tier.stats.num_stored == 0 and not ranks[1]._reports, "the other one was waited for"


def test_damaged_values_of_all_ranks_are_counted(tier: ColdTier, ranks: list[FakeRank]) -> None:
    ranks[0].num_damaged, ranks[1].num_damaged = 2, 1
    assert tier.counts().num_damaged == 3


def test_a_fetch_ends_with_the_last_rank_and_fails_with_any(ranks: list[FakeRank]) -> None:
    fetches = RankedFetches(tasks_of(ranks))
    one, two = fetches.begin(names(1), [7]), fetches.begin(names(2, 3), [8, 9])
    first, second = (task for task in ranks[0].told if isinstance(task, RankFetch))
    assert (first.names, first.into, second.names) == (names(1), [7], names(2, 3))
    assert ranks[0].told == ranks[1].told
    ranks[0].end(second.number, "it is gone")
    ranks[0].end(first.number)
    assert fetches.take_ended() == [] and fetches.num_running == 2
    ranks[1].end(second.number)
    assert fetches.take_ended() == [two] and two.error == "it is gone"
    ranks[1].end(first.number)
    assert fetches.take_ended() == [one] and one.error is None
    assert fetches.num_running == 0
