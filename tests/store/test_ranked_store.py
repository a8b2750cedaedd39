"""A block of a worker with several ranks is stored when all have put their parts, and is there for
workers of any size."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.models.share import Share
from disagg.store.cold_tier import ColdTier
from disagg.store.ranked_store import RankedFetches
from disagg.store.redis_store import RedisStore
from tests.store.fake_rank_store import FakeRankStore
from tests.store.fake_store import FakeStore
from tests.store.tiers import (
    NBYTES,
    block,
    name,
    names,
    offer,
    one_second_a_block,
    wait_until,
)

_layouts = itertools.count()


def known(tier: ColdTier) -> list[bytes]:
    """What it would not store again."""
    tier.poll()
    return [*tier._known]


@pytest.fixture
def ranks() -> list[FakeRankStore]:
    return [FakeRankStore(), FakeRankStore()]


@pytest.fixture
def tier(ranks: list[FakeRankStore]) -> Iterator[ColdTier]:
    tier = ColdTier(
        FakeStore(1 << 20),
        NBYTES,
        one_second_a_block(),
        queue_nbytes=3 * NBYTES,
        others=ranks,
        clock=time.monotonic,
    )
    yield tier
    tier.close(0.0)


def put_here(tier: ColdTier, num_blocks: int) -> None:
    """Wait until the first rank has put its parts."""

    def is_put() -> bool:
        tier.poll()
        return len(tier._thread._errors[0]) == num_blocks  # type: ignore[union-attr]

    wait_until(is_put)


def test_a_block_is_stored_when_all_ranks_have_put_their_parts(
    tier: ColdTier, ranks: list[FakeRankStore]
) -> None:
    blocks = [(4, name(1)), (2, name(2))]
    assert tier.offer(blocks, lambda numbers: [block(1), block(2)], in_host=True) == 2
    assert all(rank.puts == [(blocks, True)] for rank in ranks)
    put_here(tier, 2)
    assert known(tier) == [] and tier.stats.queued_nbytes == 2 * NBYTES
    ranks[0].put_errors = [None, None]
    ranks[1].put_errors = [None]
    assert known(tier) == names(1)
    assert (tier.stats.num_stored, tier.stats.queued_nbytes) == (1, NBYTES)
    ranks[1].put_errors = [None]
    assert known(tier) == names(1, 2) and tier.stats.queued_nbytes == 0


def test_a_block_that_one_rank_could_not_put_is_not_stored(
    tier: ColdTier, ranks: list[FakeRankStore]
) -> None:
    tier.offer([(0, name(1))], lambda numbers: [block(1)])
    put_here(tier, 1)
    ranks[0].put_errors, ranks[1].put_errors = [None], ["Redis did not answer."]
    assert known(tier) == [] and tier.is_away
    assert (tier.stats.num_stored, tier.stats.num_put_failures) == (0, 1)


def test_the_slowest_rank_bounds_the_queue(tier: ColdTier, ranks: list[FakeRankStore]) -> None:
    assert [offer(tier, i) for i in range(4)] == [True, True, True, False]
    put_here(tier, 3)
    assert not offer(tier, 4)
    assert [len(rank.puts) for rank in ranks] == [3, 3], "what is not taken is not read"
    for rank in ranks:
        rank.put_errors = [None]
    assert offer(tier, 5) and not offer(tier, 6)


def test_ranks_are_asked_once_for_blocks_that_are_evicted_together(
    tier: ColdTier, ranks: list[FakeRankStore]
) -> None:
    """A system call for each block and rank took 4 ms of a step that evicts 256 on 8 ranks."""
    blocks = [(i, name(i)) for i in range(100)]
    tier.offer(blocks, lambda numbers: [block(i) for i in numbers])
    assert [rank.num_asked for rank in ranks] == [1, 1]


def test_a_tier_that_closes_waits_for_the_parts_of_all_ranks(
    tier: ColdTier, ranks: list[FakeRankStore]
) -> None:
    def put(rank: FakeRankStore) -> Callable[[], None]:
        return lambda: rank.put_errors.append(None)

    for rank in ranks:
        rank.waited = put(rank)
    offer(tier, 0)
    offer(tier, 1)
    assert tier.close(60.0)
    assert tier.stats.num_stored == 2


def test_a_tier_closes_without_a_rank_that_is_gone(
    tier: ColdTier, ranks: list[FakeRankStore]
) -> None:
    ranks[0].is_gone = True
    ranks[1].waited = lambda: ranks[1].put_errors.append(None)
    offer(tier, 0)
    assert tier.close(60.0)
    assert tier.stats.num_stored == 0 and not ranks[1].put_errors, "the other one was waited for"


def test_damaged_values_of_all_ranks_are_counted(
    tier: ColdTier, ranks: list[FakeRankStore]
) -> None:
    ranks[0].num_damaged, ranks[1].num_damaged = 2, 1
    assert tier.counts().num_damaged == 3


def test_a_fetch_ends_with_the_last_rank_and_fails_with_any(ranks: list[FakeRankStore]) -> None:
    fetches = RankedFetches(ranks)
    one, two = fetches.begin(names(1), [7]), fetches.begin(names(2, 3), [8, 9])
    (first, *_), (second, *_) = ranks[0].fetches
    assert (
        ranks[0].fetches
        == ranks[1].fetches
        == [(first, names(1), [7]), (second, names(2, 3), [8, 9])]
    )
    ranks[0].fetched = [(second, "it is gone"), (first, None)]
    assert fetches.take_ended() == [] and fetches.num_running == 2
    ranks[1].fetched = [(second, None)]
    assert fetches.take_ended() == [two] and two.error == "it is gone"
    ranks[1].fetched = [(first, None)]
    assert fetches.take_ended() == [one] and one.error is None
    assert fetches.num_running == 0


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8]).flatmap(
    lambda heads: st.tuples(
        st.just(heads),
        *2 * [st.sampled_from([n for n in range(1, 17) if heads % n == 0 or n % heads == 0])],
    )
)


def parts(num_heads: int, num_ranks: int, blocks: list[bytes]) -> list[tuple[range, list[bytes]]]:
    """Of each rank: its heads, and its parts of blocks."""
    found = []
    for rank in range(num_ranks):
        heads = range(*Share(rank, num_ranks).kv_heads(num_heads))
        size = len(blocks[0]) // num_heads
        own = slice(heads.start * size, heads.stop * size)
        found.append((heads, [each[own] for each in blocks]))
    return found


@given(SIZES, st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_ranks_find_what_ranks_of_another_number_stored_and_nothing_before_all_have(
    shared_redis: EmbeddedRedis,
    sizes: tuple[int, int, int],
    head_nbytes: int,
    num_blocks: int,
    rng: object,
) -> None:
    num_heads, num_writing, num_reading = sizes
    layout = f"ranked-{next(_layouts)}"

    def stores(num_ranks: int) -> list[RedisStore]:
        return [
            RedisStore(
                shared_redis.url,
                layout,
                pieces=range(*Share(rank, num_ranks).kv_heads(num_heads)),
                num_pieces=num_heads,
                timeout_s=10,
            )
            for rank in range(num_ranks)
        ]

    nbytes = num_heads * head_nbytes
    blocks = [rng.randbytes(nbytes) for _ in range(num_blocks)]  # type: ignore[attr-defined]
    keys = [name(i) for i in range(num_blocks)]
    writing, reading = stores(num_writing), stores(num_reading)
    put: set[int] = set()
    for store, (heads, own) in zip(writing, parts(num_heads, num_writing, blocks), strict=True):
        is_all = put == set(range(num_heads))
        assert all(each.contains_prefix(keys) == (num_blocks if is_all else 0) for each in reading)
        store.put_many(list(zip(keys, own, strict=True)))
        put.update(heads)
    for store, (_, own) in zip(reading, parts(num_heads, num_reading, blocks), strict=True):
        assert store.contains_prefix([*keys, name(99)]) == num_blocks
        assert store.get_many(keys) == own
    for store in (*writing, *reading):
        store.close()
