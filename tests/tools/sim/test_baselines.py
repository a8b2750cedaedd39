"""Each policy looks at its one thing, and all keep to what no policy may do."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from disagg.errors import Unavailable
from disagg.messages import GenerateRequest
from disagg.router.fleet import Fleet
from disagg.router.policy import choose_route
from disagg.router.route import Route
from disagg.tools.sim.baselines import ADMIT_ALL, LATENCY, OURS, POLICIES, TAICHI, new_policy
from tests.router.fakes import make_fleet, make_request, make_status

OTHERS = [name for name in POLICIES if name != OURS]


def routes(name: str, fleet: Fleet, request: GenerateRequest, number: int = 40) -> list[Route]:
    choose, rng = new_policy(name), random.Random(0)
    return [choose(request, fleet.view(), fleet.index, 0.0, rng) for _ in range(number)]


def busy(fleet: Fleet, worker_id: str, num_uncomputed_tokens: int, num_running: int = 0) -> None:
    status = make_status(num_uncomputed_tokens=num_uncomputed_tokens, num_running=num_running)
    fleet.worker_stepped(worker_id, (), status)


def test_ours_is_the_one_that_serves() -> None:
    assert new_policy(OURS) is new_policy(ADMIT_ALL) is choose_route


@pytest.mark.parametrize("name", OTHERS)
def test_prefill_and_decode_go_to_their_pools(name: str) -> None:
    fleet = make_fleet("p0", "p1", "d0", "d1")
    busy(fleet, "d0", 10**6)  # as TaiChi lets idle decode workers compute prompts
    busy(fleet, "d1", 10**6)
    for route in routes(name, fleet, make_request()):
        assert (route.prefill or "")[0] == "p" and route.decode[0] == "d"
    for route in routes(name, make_fleet("p0", "p1"), make_request()):
        assert route.prefill is None and route.decode[0] == "p"


@pytest.mark.parametrize("name", OTHERS)
def test_whom_to_leave_out_is_left_out(name: str) -> None:
    fleet, rng = make_fleet("p0", "p1", "d0"), random.Random(0)
    busy(fleet, "d0", 10**6)
    route = new_policy(name)(make_request(), fleet.view(), fleet.index, 0.0, rng, exclude={"p0"})
    assert route.prefill == "p1"
    with pytest.raises(Unavailable):
        new_policy(name)(make_request(), Fleet().view(), fleet.index, 0.0, rng)


def test_turns_are_even() -> None:
    found = routes("round-robin", make_fleet("p0", "p1", "d0", "d1"), make_request())
    assert Counter(route.prefill for route in found) == {"p0": 20, "p1": 20}
    assert Counter(route.decode for route in found) == {"d0": 20, "d1": 20}


def test_the_least_loaded_is_chosen_among_all_or_two() -> None:
    fleet = make_fleet("p0", "p1", "p2", "d0", "d1")
    busy(fleet, "p0", 500)
    busy(fleet, "p1", 100)
    busy(fleet, "p2", 900)
    busy(fleet, "d0", 0, num_running=3)
    found = routes("least-loaded", fleet, make_request())
    assert {(route.prefill, route.decode) for route in found} == {("p1", "d1")}
    of_two = Counter(route.prefill for route in routes("two-choices", fleet, make_request(), 300))
    assert "p2" not in of_two and of_two["p1"] > of_two["p0"] > 50


def test_the_prefix_alone_decides() -> None:
    request = make_request(320)
    held = {"p1": list(request.block_hashes[:10]), "p0": list(request.block_hashes[:4])}
    fleet = make_fleet("p0", "p1", "p2", "d0", held=held)
    busy(fleet, "p1", 10**6)
    (route,) = set(routes("prefix-only", fleet, request))
    assert (route.prefill, route.num_cached_tokens) == ("p1", 160)


def test_chance_reaches_everybody() -> None:
    found = routes("random", make_fleet("p0", "p1", "p2", "d0"), make_request(), 300)
    assert min(Counter(route.prefill for route in found).values()) > 60


def prefills(name: str, fleet: Fleet, request: GenerateRequest) -> set[str | None]:
    return {route.prefill for route in routes(name, fleet, request)}


@pytest.mark.parametrize(
    ("name", "num_held", "num_queued", "chosen"),
    [
        # p0 has `num_held` of ten blocks of the prompt, and so many tokens queued.
        ("dynamo", 10, 100, "p0"),
        ("dynamo", 10, 200, "p1"),  # more than the 160 tokens that it saves
        ("sglang", 4, 10**6, "p0"),  # 0.4 of the prompt, and no count of requests differs
        ("ray-prefix", 2, 10**6, "p0"),
        ("preble", 6, 0, "p0"),
        ("preble", 6, 10**6, "p1"),  # more than twice the load
        ("preble", 4, 100, "p1"),  # less than half of the prompt
        ("llm-d", 10, 10**6, "p0"),  # counts requests, and none waits
    ],
)
def test_a_cached_prefix_counts_as_each_system_says(
    name: str, num_held: int, num_queued: int, chosen: str
) -> None:
    request = make_request(160)
    fleet = make_fleet("p0", "p1", "d0", held={"p0": list(request.block_hashes[:num_held])})
    busy(fleet, "p0", num_queued)
    assert prefills(name, fleet, request) == {chosen}


@pytest.mark.parametrize(("name", "num_held"), [("sglang", 3), ("ray-prefix", 1)])
def test_a_short_match_goes_to_the_smallest_cache(name: str, num_held: int) -> None:
    request = make_request(160)
    fleet = make_fleet("p0", "p1", "d0", held={"p0": list(request.block_hashes[:num_held])})
    fleet.worker_stepped("p0", (), make_status(num_free_blocks=10))
    assert prefills(name, fleet, request) == {"p1"}


def test_a_gap_between_loads_goes_before_the_cache_in_sglang_only() -> None:
    request = make_request(160)
    fleet = make_fleet("p0", "p1", "d0", held={"p0": list(request.block_hashes)})
    busy(fleet, "p0", 0, num_running=65)
    assert prefills("sglang", fleet, request) == {"p1"}
    assert prefills("ray-prefix", fleet, request) == {"p0"}


def test_the_least_headroom_before_both_slos_is_chosen() -> None:
    fleet, request = make_fleet("p0", "p1", "p2"), make_request(100)
    busy(fleet, "p1", 1000)  # 0.1 s
    busy(fleet, "p2", 9000)
    for slo_s, chosen in ((10.0, {"p2"}), (0.5, {"p1"}), (1e-6, {"p0", "p1", "p2"})):
        choose, rng = new_policy(LATENCY, (slo_s, 1.0)), random.Random(0)
        found = [choose(request, fleet.view(), fleet.index, 0.0, rng) for _ in range(200)]
        assert {route.decode for route in found} == chosen, "no headroom: by chance"


def test_taichi_takes_the_worker_that_is_done_first_in_its_steps() -> None:
    """A decode worker with small steps gets short prompts, and a prefill worker long ones."""
    fleet, rng = make_fleet("p0", "d0", "d1"), random.Random(0)
    busy(fleet, "p0", 2000)
    busy(fleet, "d0", 0, num_running=1)
    choose = new_policy(TAICHI, chunks=(1024, 64))

    def route(num_tokens: int) -> tuple[str | None, str]:
        found = choose(make_request(num_tokens), fleet.view(), fleet.index, 0.0, rng)
        return found.prefill, found.decode

    assert route(64) == (None, "d1")  # one step there, and three on p0
    assert route(8_000) == ("p0", "d1")
    assert route(17_000) == (None, "p0"), "no decode worker has blocks for it"
