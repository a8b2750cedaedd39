"""Hand-made fleets in which the right choice is known."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.adapters import Adapter, AdapterReport
from disagg.errors import DeadlineExceeded, Unavailable
from disagg.messages import GenerateRequest, HostCounts, KVEvent, TransferFigure
from disagg.router.fleet import Fleet
from disagg.router.policy import NUM_CANDIDATES_KEPT, _choose, choose_decode, choose_route
from disagg.router.route import Candidate, Route
from disagg.router.worker_pools import sample_workers
from disagg.router.worker_view import UNMEASURED_LATENCY_S, UNMEASURED_S_PER_BYTE, RequestLoad
from tests.grids import examples
from tests.router.fakes import (
    far_from,
    held_by,
    make_fleet,
    make_record,
    make_request,
    make_status,
)


def choose(
    fleet: Fleet, request: GenerateRequest, seed: int = 0, exclude: tuple[str, ...] = ()
) -> Route:
    rng = random.Random(seed)
    return choose_route(request, fleet.view(), fleet.index, 0.0, rng, exclude)


def busy(fleet: Fleet, worker_id: str, **status: Any) -> None:
    fleet.worker_stepped(worker_id, (), make_status(**status))


def test_a_long_prompt_is_kept_away_from_running_decodes() -> None:
    fleet = make_fleet("p0", "d0")
    busy(fleet, "d0", num_running=16, num_context_tokens=16_000)
    route = choose(fleet, make_request(2000))
    assert (route.prefill, route.decode) == ("p0", "d0")
    assert route.reason.startswith("remote prefill: ")
    assert route.cause == "transfer_or_decode", "running decodes would be held up"


def test_a_cached_prompt_stays_where_it_is() -> None:
    request = make_request(2000)
    fleet = make_fleet("p0", "d0", "d1", held={"d1": list(request.block_hashes)})
    busy(fleet, "d0", num_running=2, num_context_tokens=2000)
    busy(fleet, "d1", num_running=2, num_context_tokens=2000)
    route = choose(fleet, request)
    assert (route.prefill, route.decode, route.prefix_source) == (None, "d1", None)
    assert route.num_cached_tokens == 1999
    assert route.reason.startswith("local prefill: ") and route.cause == "compute"


def test_a_prompt_goes_where_it_can_be_loaded_from_host_memory() -> None:
    request = make_request(2000)
    host = HostCounts(latency_s=1e-3, block_s=1e-5)
    fleet = make_fleet("p0", "d0", "d1")
    in_host = KVEvent("stored", request.block_hashes, "host")
    fleet.worker_synced(make_record("d1"), [], make_status(host=host))
    fleet.worker_stepped("d1", [in_host], make_status(host=host))
    route = choose(fleet, request)
    assert (route.prefill, route.decode, route.num_cached_tokens) == (None, "d1", 1999)
    gone = KVEvent("removed", request.block_hashes, "host")
    fleet.worker_stepped("d1", [gone], make_status(host=host))
    assert choose(fleet, request).prefill == "p0"
    fleet.worker_stepped("d1", [in_host], make_status(host=host))
    fleet.worker_lost("d1")
    assert not held_by(fleet.index, request.block_hashes)


def test_an_adapter_is_used_where_it_is_unless_loading_it_elsewhere_is_quicker() -> None:
    adapter = Adapter("sql", "toy", "/adapters/sql", "00ff")
    request = make_request(2000, adapter=adapter)
    there = AdapterReport(on_device=("00ff",), load_s=0.5)
    elsewhere = AdapterReport(on_device=("aa00",), load_s=0.5)
    fleet = make_fleet("d0", "d1", "d2")
    busy(fleet, "d0", adapters=elsewhere)
    busy(fleet, "d1", adapters=there, num_waiting=1, num_uncomputed_tokens=3000)
    busy(fleet, "d2")  # has no room for adapters at all
    assert choose(fleet, request).decode == "d1"
    assert choose(fleet, make_request(2000)).decode != "d1"
    busy(fleet, "d1", adapters=there, num_waiting=4, num_uncomputed_tokens=12_000)
    route = choose(fleet, request)
    assert route.decode == "d0"
    assert route.chosen.own_s > 0.5
    fleet = make_fleet("p0", "p1", "d0")
    busy(fleet, "d0", adapters=there, num_running=16, num_context_tokens=16_000)
    busy(fleet, "p0", adapters=elsewhere)
    busy(fleet, "p1", adapters=there)
    assert choose(fleet, request).prefill == "p1"


def test_an_idle_fleet_hands_long_prompts_over_and_computes_short_rests_in_place() -> None:
    fleet = make_fleet("p0", "d0")
    assert choose(fleet, make_request(500)).prefill == "p0"
    assert choose(fleet, make_request(16)).prefill is None
    request = make_request(500)
    fleet.worker_stepped("d0", [KVEvent("stored", request.block_hashes[:-1])], make_status())
    assert choose(fleet, request).prefill is None


def test_a_slow_network_keeps_prefill_local() -> None:
    fleet = make_fleet("p0", make_record("d0", block_nbytes=1 << 20))
    slow = (TransferFigure("p0", 1.0, 1e5),)
    status = make_status(num_running=16, num_context_tokens=16_000, transfers=slow)
    fleet.worker_stepped("d0", (), status)
    route = choose(fleet, make_request(2000))
    assert route.prefill is None and route.cause == "transfer_or_decode"


def test_a_long_queue_at_prefill_is_avoided() -> None:
    fleet = make_fleet("p0", "d0")
    busy(fleet, "d0", num_running=2, num_context_tokens=2000)
    busy(fleet, "p0", num_waiting=40, num_uncomputed_tokens=40_000)
    route = choose(fleet, make_request(1000))
    assert route.prefill is None and route.cause == "queue"


def test_prefill_goes_to_the_worker_that_holds_the_prefix() -> None:
    request = make_request(2000)
    fleet = make_fleet("p0", "p1", "p2", "d0", held={"p1": list(request.block_hashes[:100])})
    busy(fleet, "d0", num_running=16, num_context_tokens=16_000)
    route = choose(fleet, request)
    assert (route.prefill, route.num_cached_tokens) == ("p1", 1600)


def test_a_prefix_is_left_when_the_queue_before_it_is_longer() -> None:
    request = make_request(2000)
    fleet = make_fleet("p0", "p1", "d0", held={"p1": list(request.block_hashes[:100])})
    busy(fleet, "p0", transfers=far_from("p1"))
    busy(fleet, "d0", num_running=32, num_context_tokens=32_000, num_uncomputed_tokens=80_000)
    busy(fleet, "p1", num_waiting=8, num_uncomputed_tokens=8000)
    assert choose(fleet, request).prefill == "p1"  # a copy costs more than the wait
    busy(fleet, "p1", num_waiting=8, num_uncomputed_tokens=40_000)
    assert choose(fleet, request).prefill == "p0"


def test_a_prefix_that_is_in_demand_spreads() -> None:
    request = make_request(2000)
    head = list(request.block_hashes[:100])
    for holders, prefill in ((("p1",), "p1"), (("p1", "p2"), "p0")):
        fleet = make_fleet("p0", "p1", "p2", "d0", held=dict.fromkeys(holders, head))
        far = far_from("p1", "p2")
        busy(fleet, "p0", transfers=far)
        busy(fleet, "d0", num_running=32, num_context_tokens=32_000, num_uncomputed_tokens=80_000)
        for worker_id in ("p1", "p2"):
            busy(fleet, worker_id, num_uncomputed_tokens=8000, transfers=far)
        assert choose(fleet, request).prefill == prefill


def test_a_prefix_is_pulled_when_the_queue_before_it_is_longer() -> None:
    request = make_request(2000)
    held = {"d1": list(request.block_hashes[:100])}
    for layout, source in (("toy/bs16", "d1"), ("another", None)):
        fleet = make_fleet(make_record("d0", layout=layout), "d1", held=held)
        assert choose(fleet, request).prefix_source is None  # who has it is free
        busy(fleet, "d1", num_waiting=8, num_uncomputed_tokens=8000)
        route = choose(fleet, request)
        assert (route.prefill, route.prefix_source) == (None, source)
        assert (route.decode, route.num_cached_tokens) == ("d0" if source else "d1", 1600)
        assert route.chosen.prefix_source == source


def test_only_workers_that_prefill_for_themselves_pull_prefixes() -> None:
    """Else the prefix moves twice, and waits for long steps where all is prefill."""
    request = make_request(2000)
    fleet = make_fleet("p0", "p1", "d0", held={"p1": list(request.block_hashes[:100])})
    busy(fleet, "p1", num_waiting=8, num_uncomputed_tokens=8000)
    ways = choose(fleet, request).candidates
    assert {way.prefix_source for way in ways if way.prefill is None} >= {"p1"}
    assert {way.prefix_source for way in ways if way.prefill is not None} == {None}


def test_the_last_token_is_computed_in_any_case() -> None:
    request = make_request(1600)
    fleet = make_fleet("d0", "d1", held={"d1": list(request.block_hashes)})
    busy(fleet, "d1", num_waiting=8, num_uncomputed_tokens=8000)
    route = choose(fleet, request)
    assert (route.prefill, route.decode, route.prefix_source) == (None, "d0", "d1")
    assert route.num_cached_tokens == 1584


def test_a_prefix_pull_waits_for_the_step_of_its_source() -> None:
    """The other worker answers between two steps, and one of 500 prompt tokens takes 60 ms."""
    request = make_request(640)
    fleet = make_fleet("d0", "d1", held={"d1": list(request.block_hashes)})
    busy(fleet, "d1", num_waiting=1, num_uncomputed_tokens=500)
    pulling, again = (
        next(way for way in choose(fleet, request).candidates if way.decode == name)
        for name in ("d0", "d1")
    )
    assert pulling.prefix_source == "d1" and again.prefix_source is None
    assert pulling.own_s == pytest.approx(0.06 + 0.0116 + UNMEASURED_LATENCY_S, abs=1e-3)


def test_decode_goes_to_the_least_crowded_worker() -> None:
    fleet = make_fleet("d0", "d1", "d2")
    busy(fleet, "d0", num_running=10, num_context_tokens=10_000)
    busy(fleet, "d1", num_running=3, num_context_tokens=3000)
    busy(fleet, "d2", num_running=20, num_context_tokens=20_000)
    assert choose(fleet, make_request(100)).decode == "d1"


def test_unequal_layouts_are_never_paired() -> None:
    fleet = make_fleet(make_record("p0", layout="another"), "d0")
    busy(fleet, "d0", num_running=30, num_context_tokens=30_000)
    route = choose(fleet, make_request(2000))
    assert [(c.prefill, c.decode) for c in route.candidates] == [(None, "d0")]


def test_without_decode_workers_prefill_workers_decode() -> None:
    fleet = make_fleet("p0", "p1")
    route = choose(fleet, make_request())
    assert route.prefill is None
    assert route.decode in ("p0", "p1")
    assert route.reason == "local prefill: remote prefill is not available"
    assert route.cause == "other_unavailable"


def test_where_everybody_prefills_streams_do_not_make_queues_uneven() -> None:
    fleet = make_fleet("p0", "p1")
    busy(fleet, "p0", num_running=12, num_context_tokens=12_000)
    busy(fleet, "p1", num_running=8, num_context_tokens=8000, num_uncomputed_tokens=4000)
    assert choose(fleet, make_request(2000, max_tokens=1)).decode == "p0"


def test_only_workers_of_the_model_that_accept_and_are_not_excluded_are_chosen() -> None:
    fleet = make_fleet("d0", "d1", "d2", make_record("d3", model="large"))
    fleet.worker_stepped("d0", (), make_status(accepting=False))
    chosen = {choose(fleet, make_request(), seed, exclude=("d1",)).decode for seed in range(30)}
    assert chosen == {"d2"}
    with pytest.raises(Unavailable, match="'toy'"):
        choose(fleet, make_request(), exclude=("d1", "d2"))
    assert choose(fleet, make_request(model="large")).decode == "d3"


def test_a_passed_deadline_is_said_so() -> None:
    with pytest.raises(DeadlineExceeded):
        choose(make_fleet("d0"), make_request(deadline_unix_s=0.0))


def test_ties_are_spread_and_repeatable() -> None:
    fleet = make_fleet(*(f"d{i}" for i in range(10)))
    counts = Counter(choose(fleet, make_request(), seed).decode for seed in range(1000))
    assert len(counts) == 10
    assert max(counts.values()) < 3 * min(counts.values())
    assert choose(fleet, make_request(), 7) == choose(fleet, make_request(), 7)
    fleet = make_fleet("d0", *(f"p{i}" for i in range(10)))
    busy(fleet, "d0", num_running=16, num_context_tokens=16_000)
    prefills = Counter(choose(fleet, make_request(2000), seed).prefill for seed in range(1000))
    assert len(prefills) == 10
    assert max(prefills.values()) < 3 * min(prefills.values())


def test_only_what_the_decode_worker_lacks_is_moved() -> None:
    request = make_request(2000)
    totals = []
    for num_held in (0, 100):
        held = {"d0": list(request.block_hashes[:num_held])}
        fleet = make_fleet("p0", make_record("d0", block_nbytes=1 << 20), held=held)
        ways = choose(fleet, request).candidates
        (remote,) = [c for c in ways if c.prefill == "p0" and c.prefix_source is None]
        totals.append(remote.total_s)
    # What a rank of the decode worker takes; the prefill worker's ranks may have other parts.
    assert totals[0] - totals[1] == pytest.approx(100 * (1 << 20) * UNMEASURED_S_PER_BYTE)


def test_a_prefix_at_a_slightly_busier_decode_worker_saves_its_transfer() -> None:
    request = make_request(3000)
    big = {"block_nbytes": 1 << 23}
    names = [f"d{i}" for i in range(10)]
    fleet = make_fleet(
        make_record("p0", **big),
        *(make_record(name, **big) for name in names),
        held={"d7": list(request.block_hashes[:94])},
    )
    for name in names:
        num_running = 17 if name == "d7" else 16
        busy(fleet, name, num_running=num_running, num_context_tokens=1000 * num_running)
    route = choose(fleet, request)
    assert (route.prefill, route.decode) == ("p0", "d7")


def test_a_short_answer_weighs_less_on_its_worker() -> None:
    fleet = make_fleet("d0")
    short = choose(fleet, make_request(100, max_tokens=1)).candidates[0]
    long = choose(fleet, make_request(100, max_tokens=50)).candidates[0]
    assert long.total_s - long.first_token_s > 49 * (short.total_s - short.first_token_s) * 0.4
    moved = make_request(token_ids=tuple(range(149)), num_prompt_tokens=100, max_tokens=50)
    last = choose(fleet, moved).candidates[0]
    assert last.total_s - last.first_token_s < (long.total_s - long.first_token_s) / 10


def test_a_burst_is_spread_by_its_own_reservations() -> None:
    fleet = make_fleet("d0", "d1", "d2", "d3")
    counts: Counter[str] = Counter()
    for seed in range(40):
        route = choose(fleet, make_request(400), seed)
        fleet.reserve(route.decode, RequestLoad(400, 1, 400))
        counts[route.decode] += 1
    assert set(counts.values()) == {10}


def choose_after_prefill(
    fleet: Fleet, request: GenerateRequest, exclude: tuple[str, ...] = ()
) -> Route:
    rng = random.Random(0)
    return choose_decode(request, "p0", 2000, fleet.view(), fleet.index, 0.0, rng, exclude)


def test_finished_kv_goes_to_a_decode_worker_and_is_not_computed_again() -> None:
    request = make_request(2001)
    fleet = make_fleet("p0", "d0", "d1")
    busy(fleet, "d0", num_running=10, num_context_tokens=10_000)
    route = choose_after_prefill(fleet, request)
    assert (route.prefill, route.decode, route.num_cached_tokens) == (None, "d1", 2000)
    assert choose_after_prefill(fleet, request, exclude=("d1",)).decode == "d0"


def test_finished_kv_is_computed_again_where_moving_it_takes_longer() -> None:
    fleet = make_fleet("p0", "d0")
    slow = make_status(transfers=(TransferFigure("p0", 10.0, 1e5),))
    fleet.worker_stepped("d0", (), slow)
    assert choose_after_prefill(fleet, make_request(2001)).num_cached_tokens == 0


def test_nothing_is_moved_to_a_worker_that_holds_it() -> None:
    request = make_request(2400)
    fleet = make_fleet("p0", "d0", held={"d0": list(request.block_hashes)})
    fleet.worker_stepped("d0", (), make_status(transfers=(TransferFigure("p0", 0.0, 1e3),)))
    (candidate,) = choose_after_prefill(fleet, request).candidates
    assert candidate.num_cached_tokens == 2399
    assert candidate == choose(fleet, request).candidates[0]


def test_finished_kv_whose_source_left_is_computed_again() -> None:
    fleet = make_fleet("d0")
    route = choose_after_prefill(fleet, make_request(2001))
    assert (route.decode, route.num_cached_tokens) == ("d0", 0)


loads = st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(0, 20_000), st.booleans())


@examples(20)
@given(
    roles=st.lists(st.sampled_from("pd"), min_size=1, max_size=12),
    load=st.lists(loads, min_size=12, max_size=12),
    held=st.lists(st.integers(0, 62), min_size=12, max_size=12),
    num_tokens=st.integers(1, 1000),
    seed=st.integers(0, 100),
)
def test_no_fleet_leads_to_a_worker_that_cannot_serve(
    roles: list[str],
    load: list[tuple[int, int, int, bool]],
    held: list[int],
    num_tokens: int,
    seed: int,
) -> None:
    request = make_request(num_tokens)
    names = [f"{role}{i}" for i, role in enumerate(roles)]
    fleet = make_fleet(
        *names,
        held={
            name: list(request.block_hashes[:count])
            for name, count in zip(names, held, strict=False)
        },
    )
    for name, (num_running, num_waiting, num_uncomputed, accepting) in zip(
        names, load, strict=False
    ):
        status = make_status(
            num_running=num_running,
            num_waiting=num_waiting,
            num_uncomputed_tokens=num_uncomputed,
            num_context_tokens=200 * num_running,
            accepting=accepting,
        )
        fleet.worker_stepped(name, (), status)
    able = {name for name, status in zip(names, load, strict=False) if status[3]}
    if not able:
        with pytest.raises(Unavailable):
            choose(fleet, request, seed)
        return
    route = choose(fleet, request, seed)
    assert route.decode in able
    assert route.prefill is None or route.prefill in able
    assert route.prefill is None or route.prefill.startswith("p")
    assert route.decode.startswith("d") or not any(name.startswith("d") for name in able)
    costs = [candidate.total_s for candidate in route.candidates]
    assert costs == sorted(costs) and route.chosen in route.candidates
    assert route.predicted_s > 0
    assert 0 <= route.num_cached_tokens < num_tokens


def test_a_route_tells_the_best_of_the_other_kind_even_if_it_costs_the_same() -> None:
    """The admission queue takes it when the workers of the chosen kind are full."""
    names = [f"d{n}" for n in range(2 * NUM_CANDIDATES_KEPT)]
    fleet, request = make_fleet("p0", *names), make_request()
    compared = sample_workers(request, fleet.view().pools["toy"], fleet.index, random.Random(3))
    equal = [Candidate(None, name, 0.1, 0.0, 0.1, 1.0, 0) for name in names]
    other = Candidate("p0", "d0", 0.1, 0.0, 0.1, 1.0, 0)
    route = _choose([*equal, other], compared)
    assert route.decode == compared.decodes.workers[0].worker_id
    assert other in route.candidates and route.chosen in route.candidates
