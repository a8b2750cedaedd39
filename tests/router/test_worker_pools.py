"""Rankings agree with sorting, and pools with what is known of their workers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages import StepCosts
from disagg.router.fleet import Fleet, Reservation
from disagg.router.prefix_index import PrefixIndex
from disagg.router.worker_pools import BUCKETS_PER_OCTAVE, NUM_ALL_LOOKED_AT, Ranking, WorkerPool
from disagg.router.worker_view import RequestLoad, WorkerView
from tests.router.fakes import COSTS, make_record, make_status

STEP = 2.0 ** (1.0 / BUCKETS_PER_OCTAVE)  # what places are exact to


@settings(deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.none() | st.floats(1e-4, 1e4)), max_size=60
    ),
    number=st.integers(1, 10),
    seed=st.integers(0, 9),
)
def test_the_cheapest_are_those_of_a_sorted_list(
    changes: list[tuple[str, float | None]], number: int, seed: int
) -> None:
    ranking: Ranking[str] = Ranking()
    costs: dict[str, float] = {}
    for name, cost_s in changes:
        if cost_s is not None:
            costs[name] = cost_s
            ranking.put(name, cost_s)
        elif costs.pop(name, None) is not None:
            ranking.drop(name)
    found = ranking.cheapest(number, random.Random(seed))
    assert len(found) == len(set(found)) == min(number, len(costs))
    found_s, least_s = sorted(costs[name] for name in found), sorted(costs.values())[:number]
    assert all(
        cost_s <= least * STEP * 1.01 for cost_s, least in zip(found_s, least_s, strict=True)
    )


def test_among_equals_all_are_found_in_turn() -> None:
    ranking: Ranking[str] = Ranking()
    rng = random.Random(0)
    for number in range(100):
        ranking.put(f"w{number}", 1.0)
    assert len({name for _ in range(200) for name in ranking.cheapest(3, rng)}) == 100


def test_no_cost_is_too_small_or_too_large_for_a_place() -> None:
    ranking: Ranking[str] = Ranking()
    for number, cost_s in enumerate((1e300, 0.0, 1.0, float("inf"))):
        ranking.put(str(number), cost_s)
    assert ranking.cheapest(2, random.Random(0)) == ["1", "2"]


def large_fleet(tpot_slo_s: float = float("inf")) -> Fleet:
    """Half of the workers prefill; one more makes it large."""
    fleet = Fleet(tpot_slo_s={"toy": tpot_slo_s})
    for number in range(NUM_ALL_LOOKED_AT):
        fleet.worker_synced(make_record(f"{'dp'[number % 2]}{number}"), [], make_status())
    return fleet


def assert_is_current(pool: WorkerPool, members: Sequence[WorkerView], is_alone: bool) -> None:
    """Estimates and rankings are those of a pool which sees its workers for the first time."""
    fresh = WorkerPool(*pool.rankings)
    for worker in members:
        fresh.rank(fresh.put(worker, PrefixIndex()), spares_decodes=not is_alone)
    estimates = [
        {each.name: (each.any_s, each.token_s) for each in its.workers} for its in (pool, fresh)
    ]
    assert estimates[0] == estimates[1]
    for part, ranking in pool.rankings.items():
        buckets = [
            {each.name: number for each, number in its.bucket_of.items()}
            for its in (ranking, fresh.rankings[part])
        ]
        assert buckets[0] == buckets[1]
        assert set(ranking.cheapest(99, random.Random(0))) == set(pool.workers)


def names_of(pool: WorkerPool) -> list[str]:
    return [worker.name for worker in pool.workers]


@pytest.mark.parametrize("tpot_slo_s", (math.inf, 0.05, 0.0125))
def test_pools_know_their_workers_and_queues_whatever_happens(tpot_slo_s: float) -> None:
    rng, fleet = random.Random(1), large_fleet(tpot_slo_s)
    names = [*fleet.view().workers, "d-new", "p-new"]
    reservations: list[Reservation] = []
    for _ in range(2000):
        name = rng.choice(names)
        known = name in fleet.view().workers
        event = rng.randrange(8)
        status = make_status(
            accepting=rng.random() < 0.9,
            num_waiting=rng.randrange(4),
            num_uncomputed_tokens=rng.choice((0, 5000)),
            num_running=rng.choice((0, 1, 20)),
        )
        if event == 0 and known:
            fleet.worker_lost(name)
        elif event in (1, 2, 3) and known:
            reservations.append(fleet.reserve(name, RequestLoad(100, 1, 100)))
        elif event == 4 and reservations:
            fleet.release(reservations.pop(rng.randrange(len(reservations))))
        elif known:
            fleet.worker_stepped(name, (), status)
        else:
            fleet.worker_synced(make_record(name), [], status)
        view = fleet.view()
        pools, accepting = view.pools["toy"], [w for w in view.workers.values() if w.accepting]
        assert pools.num_workers == len(accepting)
        assert pools.is_large == (len(accepting) > NUM_ALL_LOOKED_AT)
        is_shared = pools.prefill is pools.decode
        assert is_shared == (tpot_slo_s != math.inf)
        for role, pool in (("prefill", pools.prefill), ("decode", pools.decode)):
            members = [w for w in accepting if is_shared or w.record.role == role]
            assert sorted(names_of(pool)) == sorted(worker.worker_id for worker in members)
            assert pool.num_prompts == sum(worker.backlog.num_prompts for worker in members)
            places = {fleet.index.places(worker.worker_id): worker.worker_id for worker in members}
            assert {(at,): each.name for at, each in pool.by_index_place.items()} == places
            assert pool.index_bits == sum(1 << place for (place,) in places)
            if pools.is_large:
                assert_is_current(pool, members, is_alone=is_shared)


def test_the_rankings_of_a_pool_are_those_that_decisions_read() -> None:
    fleet = large_fleet()
    fleet.worker_synced(make_record("p-one-more"), [], make_status())
    pools = fleet.view().pools["toy"]
    decodes = names_of(pools.decode)
    assert set(pools.prefill.rankings) == {"short", "long"}
    assert set(pools.decode.rankings) == {"decode", "both"}
    for number in range(len(decodes)):
        fleet.worker_synced(make_record(f"p-more{number}"), [], make_status(num_running=number))
    for name in decodes:
        fleet.worker_lost(name)
    assert pools.is_large
    assert set(pools.prefill.rankings) == {"both"}  # they decode too
    views = fleet.view().workers
    assert_is_current(pools.prefill, list(views.values()), is_alone=True)
    fleet.worker_synced(make_record("d-new"), [], make_status())
    assert set(pools.prefill.rankings) == {"short", "long"}
    prefills = [worker for worker in views.values() if worker.worker_id != "d-new"]
    assert_is_current(pools.prefill, prefills, is_alone=False)


def test_reports_move_a_worker_in_the_ranking() -> None:
    fleet, rng = large_fleet(), random.Random(2)
    fleet.worker_synced(make_record("d-one-more"), [], make_status())
    decodes = fleet.view().pools["toy"].decode
    for name in names_of(decodes)[1:]:
        fleet.worker_stepped(name, (), make_status(num_running=8, num_context_tokens=8000))
    idle = decodes.workers[0]
    for ranking in decodes.rankings.values():
        assert ranking.cheapest(1, rng) == [idle]
    slow = StepCosts(tuple(20 * each for each in COSTS.coefficients), 1000, 0.0)
    fleet.worker_stepped(idle.name, (), make_status(step_costs=slow))
    assert idle not in decodes.rankings["decode"].cheapest(len(decodes) - 1, rng)


def test_a_worker_may_be_the_cheapest_only_for_short_prompts() -> None:
    """Beside its streams few prompt tokens fit into a step; all others have prompts queued."""
    fleet, rng = large_fleet(tpot_slo_s=0.0125), random.Random(3)
    fleet.worker_synced(make_record("d-one-more"), [], make_status())
    pool = fleet.view().pools["toy"].decode
    for name in names_of(pool)[1:]:
        queued = make_status(num_waiting=1, num_uncomputed_tokens=9000)
        fleet.worker_stepped(name, (), queued)
    streams = make_status(num_running=2, num_context_tokens=200)
    slow = pool.workers[0]
    fleet.worker_stepped(slow.name, (), streams)

    def is_first(num_tokens: int) -> bool:
        first, *_ = pool.rankings_for(num_tokens)
        return first.cheapest(1, rng) == [slow]

    assert is_first(300) and not is_first(8000)


@pytest.mark.parametrize("tpot_slo_s", (math.inf, 0.05))
def test_a_wait_is_read_once_from_each_worker(tpot_slo_s: float) -> None:
    fleet = large_fleet(tpot_slo_s)
    fleet.worker_synced(make_record("d-one-more"), [], make_status())
    for workers in fleet.view().pools["toy"].likely_soonest():
        names = [worker.worker_id for worker in workers]
        assert 0 < len(set(names)) == len(names)


def test_where_every_worker_may_do_both_there_is_one_pool() -> None:
    pools = large_fleet(tpot_slo_s=0.05).view().pools["toy"]
    assert pools.prefill is pools.decode and len(pools.decode) == NUM_ALL_LOOKED_AT


def test_a_worker_that_comes_back_with_another_role_changes_its_pool() -> None:
    fleet = large_fleet()
    name = fleet.view().pools["toy"].decode.workers[0].name
    fleet.worker_synced(make_record(name, role="prefill"), [], make_status())
    pools = fleet.view().pools["toy"]
    assert name in pools.prefill and name not in pools.decode
