"""Decisions in large fleets look at few workers, and are as good as if they looked at all."""

from __future__ import annotations

import math
import random

import pytest

from disagg.errors import DeadlineExceeded, Unavailable
from disagg.messages import GenerateRequest, HostCounts, KVEvent
from disagg.router.fleet import Fleet
from disagg.router.policy import choose_decode, choose_route
from disagg.router.route import Route
from disagg.router.shortlist import NUM_CHEAPEST, NUM_HITS, NUM_RANDOM, shortlist
from disagg.router.worker_pools import NUM_ALL_LOOKED_AT
from tests.router.fakes import make_record, make_request, make_status

NUM_WORKERS = 300
SLOS_S = (math.inf, 0.05, 0.0125)


def busy_fleet(
    tpot_slo_s: float,
    rng: random.Random,
    num_workers: int = NUM_WORKERS,
    roles: str = "pd",
    max_num_seqs: int = 64,
) -> Fleet:
    fleet = Fleet(tpot_slo_s={"toy": tpot_slo_s})
    for number in range(num_workers):
        name = f"{roles[number % len(roles)]}{number}"
        fleet.worker_synced(make_record(name, max_num_seqs=max_num_seqs), [], make_status())
        load(fleet, name, rng)
    return fleet


def load(fleet: Fleet, name: str, rng: random.Random) -> None:
    num_running, num_waiting = rng.randrange(2, 32), rng.randrange(4)
    status = make_status(
        num_running=num_running,
        num_waiting=num_waiting,
        num_uncomputed_tokens=2000 * num_waiting + rng.randrange(2000),
        num_context_tokens=1000 * num_running,
    )
    fleet.worker_stepped(name, (), status)


def choose(fleet: Fleet, request: GenerateRequest, seed: int = 0, at_all: bool = False) -> Route:
    rng = random.Random(seed)
    return choose_route(request, fleet.view(), fleet.index, 0.0, rng, looks_at_all=at_all)


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
@pytest.mark.parametrize("roles", ["pd", "pppd", "p", "d"])
def test_routes_cost_no_more_than_if_all_workers_were_looked_at(
    tpot_slo_s: float, roles: str
) -> None:
    rng = random.Random(3)
    fleet = busy_fleet(tpot_slo_s, rng, roles=roles)
    cost_s, least_s = 0.0, 0.0
    for turn in range(60):
        start = 10_000 * turn
        num_tokens = rng.choice((50, 500, 4000))
        request = make_request(token_ids=tuple(range(start, start + num_tokens)))
        for name in rng.sample([*fleet.view().workers], 5):
            num_held = rng.randrange(len(request.block_hashes) + 1)
            stored = KVEvent("stored", request.block_hashes[:num_held])
            fleet.worker_stepped(name, [stored], None)
        cost_s += choose(fleet, request, turn).chosen.total_s
        least_s += choose(fleet, request, turn, at_all=True).chosen.total_s
        load(fleet, rng.choice([*fleet.view().workers]), rng)
    # The shortlist tries only two prefix pulls, so it may miss the cheapest route.
    assert cost_s < 1.03 * least_s


@pytest.mark.parametrize("roles", ["pd", "p", "d"])
def test_a_stream_goes_where_slos_have_room_for_it(roles: str) -> None:
    rng = random.Random(15)
    fleet = busy_fleet(0.02, rng, roles=roles, max_num_seqs=512)
    names = [*fleet.view().workers]
    with_room = set(rng.sample(names, 3))
    for name in names:  # one stream more and all of the others miss their SLO
        num_running = 86 if name in with_room else 87
        num_queued = rng.randrange(2000)
        status = make_status(
            num_running=num_running,
            num_waiting=1,
            num_uncomputed_tokens=num_queued,
            num_context_tokens=1000 * num_running,
        )
        fleet.worker_stepped(name, (), status)
    for seed in range(20):
        assert choose(fleet, make_request(500), seed).decode in with_room
        assert choose(fleet, make_request(500), seed, at_all=True).decode in with_room


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
def test_it_looks_at_few_however_many_there_are(tpot_slo_s: float) -> None:
    fleet = busy_fleet(tpot_slo_s, random.Random(4))
    request = make_request(500)
    seen = shortlist(request, fleet.view(), fleet.index, 0.0, random.Random(0))
    assert seen.num_workers == NUM_WORKERS
    assert len(seen.decodes.workers) <= 3 * NUM_CHEAPEST + NUM_HITS + NUM_RANDOM
    all_seen = shortlist(request, fleet.view(), fleet.index, 0.0, random.Random(0), (), True)
    assert (
        len({each.worker_id for each in all_seen.decodes.workers}) == all_seen.decodes.num_workers
    )
    for of_some, of_all in zip(seen[:2], all_seen[:2], strict=True):
        assert of_some is not None and of_all is not None
        assert of_some.num_prompts == of_all.num_prompts
        assert of_some.num_workers == of_all.num_workers


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
def test_in_a_small_fleet_it_looks_at_all(tpot_slo_s: float) -> None:
    rng = random.Random(5)
    fleet = busy_fleet(tpot_slo_s, rng, NUM_ALL_LOOKED_AT)
    for seed in range(20):
        request = make_request(rng.choice((50, 500, 4000)))
        assert choose(fleet, request, seed) == choose(fleet, request, seed, at_all=True)


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
def test_the_holder_of_the_prompt_is_found_however_busy(tpot_slo_s: float) -> None:
    rng = random.Random(6)
    fleet = busy_fleet(tpot_slo_s, rng)
    request = make_request(8000)
    fleet.worker_stepped(
        "d7",
        [KVEvent("stored", request.block_hashes)],
        make_status(num_running=30, num_context_tokens=30_000, num_waiting=1),
    )
    for name in [*fleet.view().workers][100:200]:  # a system prompt
        stored = KVEvent("stored", request.block_hashes[:4])
        fleet.worker_stepped(name, [stored], None)
    seen = shortlist(request, fleet.view(), fleet.index, 0.0, rng)
    assert seen.holder is not None and seen.holder.worker_id == "d7"
    assert "d7" in [worker.worker_id for worker in seen.decodes.workers]
    assert seen.decodes.held_once == (64, 8000)
    held = {
        name: 16 * num_blocks
        for name, num_blocks in fleet.index.match(request.block_hashes).items()
    }
    assert all(
        held.get(each.worker_id, 0) == num_held
        for each, num_held in zip(seen.decodes.workers, seen.decodes.num_held, strict=True)
    )
    assert seen.num_at_holder == held["d7"] == 8000


@pytest.mark.parametrize("few, many", ["pd", "dp"])
def test_a_popular_prompt_is_found_in_the_pool_where_few_hold_it(few: str, many: str) -> None:
    fleet = busy_fleet(math.inf, random.Random(13))
    request = make_request(8000)
    names = [*fleet.view().workers]
    holders = [name for name in names if name.startswith(few)][-2:]
    others = [name for name in names if name.startswith(many)][:100]
    host = HostCounts(latency_s=1e-3, block_s=1e-5)
    busy = {"num_running": 31, "num_waiting": 4, "num_uncomputed_tokens": 10_000}
    status = make_status(**busy, num_context_tokens=31_000, host=host)
    for name in [*others, *holders]:
        fleet.worker_synced(make_record(name), request.block_hashes, status)
        fleet.worker_stepped(name, [KVEvent("stored", request.block_hashes, "host")], status)
    for name in others[:3]:
        fleet.worker_stepped(name, (), make_status(accepting=False))
    for seed in range(50):
        seen = shortlist(request, fleet.view(), fleet.index, 0.0, random.Random(seed))
        side = seen.prefills if few == "p" else seen.decodes
        assert side is not None
        assert {*holders} <= {worker.worker_id for worker in side.workers}
        assert side.held_once == (8000, 8000)


def test_a_prompt_behind_a_cache_is_found_too() -> None:
    fleet = busy_fleet(math.inf, random.Random(7))
    request = make_request(4000)
    status = make_status(host=HostCounts(latency_s=1e-3, block_s=1e-5))
    fleet.worker_synced(make_record("d7"), [], status)
    fleet.worker_stepped("d7", [KVEvent("stored", request.block_hashes, "host")], status)
    route = choose(fleet, request)
    assert (route.prefill, route.decode, route.num_cached_tokens) == (None, "d7", 3999)


def test_every_worker_is_looked_at_now_and_then() -> None:
    """One that is wrongly believed to be slow would never show that it is not."""
    fleet, rng = busy_fleet(math.inf, random.Random(8), 40), random.Random(9)
    seen: set[str] = set()
    for _ in range(400):
        found = shortlist(make_request(100), fleet.view(), fleet.index, 0.0, rng)
        assert found.prefills is not None
        for side in (found.prefills, found.decodes):
            seen.update(worker.worker_id for worker in side.workers)
    assert seen == set(fleet.view().workers)


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
def test_excluded_workers_are_not_looked_at(tpot_slo_s: float) -> None:
    fleet = busy_fleet(tpot_slo_s, random.Random(10))
    request = make_request(500)
    fleet.worker_stepped("d7", [KVEvent("stored", request.block_hashes)], make_status())
    exclude = {"d7"}
    for seed in range(20):
        seen = shortlist(request, fleet.view(), fleet.index, 0.0, random.Random(seed), exclude)
        assert seen.prefills is not None and seen.holder is None
        for side in (seen.prefills, seen.decodes):
            assert 0 < len(side.workers) <= 3 * NUM_CHEAPEST + NUM_RANDOM
            assert exclude.isdisjoint(worker.worker_id for worker in side.workers)
            assert side.held_once == (0, 0)
        told = fleet.view(), fleet.index, 0.0, random.Random(seed), exclude
        route = choose_route(request, *told)
        assert exclude.isdisjoint((route.prefill, route.decode, route.prefix_source))
        exclude |= {each for each in (route.prefill, route.decode) if each is not None}


@pytest.mark.parametrize("role", "pd")
def test_where_all_of_a_role_are_excluded_the_others_do_both(role: str) -> None:
    fleet = busy_fleet(math.inf, random.Random(14), 40)
    exclude = {name for name in fleet.view().workers if name.startswith(role)}
    request, rng = make_request(500), random.Random(0)
    route = choose_route(request, fleet.view(), fleet.index, 0.0, rng, exclude)
    assert route.prefill is None and route.decode not in exclude
    exclude = {*fleet.view().workers}
    with pytest.raises(Unavailable):
        choose_route(request, fleet.view(), fleet.index, 0.0, rng, exclude)


def test_finished_kv_goes_to_one_of_the_cheapest_of_many() -> None:
    fleet = busy_fleet(math.inf, random.Random(11))
    fleet.worker_stepped("d5", (), make_status())  # the only idle one
    request = make_request(2000)
    told = fleet.view(), fleet.index, 0.0, random.Random(0)
    assert choose_decode(request, "p0", 1999, *told).decode == "d5"


def test_a_large_fleet_of_another_model_changes_nothing() -> None:
    fleet = busy_fleet(math.inf, random.Random(12))
    fleet.worker_synced(make_record("d-other", model="other"), [], make_status())
    assert choose(fleet, make_request(100, model="other")).decode == "d-other"
    with pytest.raises(Unavailable):
        choose(fleet, make_request(100, model="none"))
    with pytest.raises(DeadlineExceeded):
        choose(fleet, make_request(100, deadline_unix_s=0.0))
