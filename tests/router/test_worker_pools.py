"""Decisions compare few workers, and are nearly as good as if they compared all."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection

import pytest

from disagg.errors import Unavailable
from disagg.messages import GenerateRequest, HostCounts, KVEvent
from disagg.router.fleet import Fleet, Reservation
from disagg.router.policy import choose_route
from disagg.router.route import Route
from disagg.router.worker_pools import NUM_DEEPEST, NUM_RANDOM, ComparedWorkers, sample_workers
from disagg.router.worker_view import RequestLoad
from tests.router.fakes import held_by, make_record, make_request, make_status

NUM_WORKERS = 300
SLOS_S = (math.inf, 0.05, 0.0125)
ROLES = ("prefill", "decode")


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
    number = sys.maxsize if at_all else NUM_RANDOM
    rng = random.Random(seed)
    return choose_route(request, fleet.view(), fleet.index, 0.0, rng, num_random=number)


def sample(
    fleet: Fleet,
    request: GenerateRequest,
    rng: random.Random,
    exclude: Collection[str] = (),
    num_random: int = NUM_RANDOM,
) -> ComparedWorkers:
    pools = fleet.view().pools[request.model]
    return sample_workers(request, pools, fleet.index, rng, exclude, num_random)


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
@pytest.mark.parametrize("roles", ["pd", "pppd", "p", "d"])
def test_routes_cost_little_more_than_if_all_workers_were_compared(
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
    assert cost_s < 1.4 * least_s


@pytest.mark.parametrize("roles", ["pd", "p", "d"])
def test_a_stream_goes_where_slos_have_room_for_it(roles: str) -> None:
    rng = random.Random(15)
    fleet = busy_fleet(0.02, rng, roles=roles, max_num_seqs=512)
    names = [*fleet.view().workers]
    with_room = set(rng.sample(names, NUM_WORKERS // 2))
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
    seen = sample(fleet, request, random.Random(0))
    assert seen.num_workers == NUM_WORKERS
    assert len(seen.decodes.workers) <= NUM_DEEPEST + NUM_RANDOM
    all_seen = sample(fleet, request, random.Random(0), num_random=sys.maxsize)
    assert (
        len({each.worker_id for each in all_seen.decodes.workers}) == all_seen.decodes.num_workers
    )
    for of_some, of_all in zip(seen, all_seen, strict=True):
        assert of_some is not None and of_all is not None
        assert of_some.num_prompts == of_all.num_prompts
        assert of_some.num_workers == of_all.num_workers


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
def test_in_a_small_fleet_it_looks_at_all(tpot_slo_s: float) -> None:
    rng = random.Random(5)
    fleet = busy_fleet(tpot_slo_s, rng, NUM_DEEPEST + NUM_RANDOM)
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
    seen = sample(fleet, request, rng)
    holder, num_at_holder = seen.holder()
    assert holder is not None and holder.worker_id == "d7"
    assert "d7" in [worker.worker_id for worker in seen.decodes.workers]
    assert seen.decodes.held_once == (64, 8000)
    matched = held_by(fleet.index, request.block_hashes)
    held = {name: 16 * num_blocks for name, num_blocks in matched.items()}
    assert all(
        held.get(each.worker_id, 0) == num_held
        for each, num_held in zip(seen.decodes.workers, seen.decodes.num_held, strict=True)
    )
    assert num_at_holder == held["d7"] == 8000


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
        seen = sample(fleet, request, random.Random(seed))
        side = seen.prefills if few == "p" else seen.decodes
        assert side is not None
        assert {*holders} <= {worker.worker_id for worker in side.workers}
        assert side.held_once == (8000, 8000)


def test_the_second_holder_is_found_whatever_the_first_one_has() -> None:
    """Or a prefix would seem to be cached once, and another copy of it would be charged for."""
    fleet, request = busy_fleet(math.inf, random.Random(3)), make_request(1024)
    for name, num_blocks in (("d7", 33), ("d9", 32)):
        stored = KVEvent("stored", request.block_hashes[:num_blocks])
        fleet.worker_stepped(name, [stored], None)
    for seed in range(8):
        assert sample(fleet, request, random.Random(seed)).decodes.held_once == (512, 528)


def test_every_worker_is_looked_at_now_and_then() -> None:
    """One that is wrongly believed to be slow would never show that it is not."""
    fleet, rng = busy_fleet(math.inf, random.Random(8), 40), random.Random(9)
    seen: set[str] = set()
    for _ in range(400):
        found = sample(fleet, make_request(100), rng)
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
        seen = sample(fleet, request, random.Random(seed), exclude)
        assert seen.prefills is not None and seen.holder() == (None, 0)
        for side in (seen.prefills, seen.decodes):
            assert 0 < len(side.workers) <= NUM_RANDOM
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


@pytest.mark.parametrize("tpot_slo_s", SLOS_S)
def test_pools_know_their_workers_and_queues_whatever_happens(tpot_slo_s: float) -> None:
    rng, fleet = random.Random(1), busy_fleet(tpot_slo_s, random.Random(2), 40)
    names = [*fleet.view().workers, "d-new", "p-new"]
    reservations: list[Reservation] = []
    for _ in range(2000):
        name = rng.choice(names)
        known = name in fleet.view().workers
        event = rng.randrange(9)
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
        elif known and event < 8:
            fleet.worker_stepped(name, (), status)
        else:
            fleet.worker_synced(make_record(name, role=rng.choice(ROLES)), [], status)
        view = fleet.view()
        pools, accepting = view.pools["toy"], [w for w in view.workers.values() if w.accepting]
        assert pools.num_workers == len(accepting)
        is_shared = pools.prefill is pools.decode
        assert is_shared == (tpot_slo_s != math.inf)
        for role, pool in (("prefill", pools.prefill), ("decode", pools.decode)):
            members = [w for w in accepting if is_shared or w.record.role == role]
            assert sorted(each.worker_id for each in pool.workers) == sorted(
                worker.worker_id for worker in members
            )
            assert pool.num_prompts == sum(worker.backlog.num_prompts for worker in members)
            bits = {fleet.index.bit(worker.worker_id): worker.worker_id for worker in members}
            assert {bit: each.worker_id for bit, each in pool.by_bit.items()} == bits
            assert pool.bits == sum(bits)
