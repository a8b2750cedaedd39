"""A worker that seemed slow gets a prompt now and then, to notice when it no longer is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from disagg.messages import StepCosts
from disagg.router.fleet import NUM_PER_EXPLORED, Fleet
from disagg.router.policy import SILENT_S, choose_route
from disagg.router.worker_view import RequestLoad
from tests.router.fakes import COSTS, make_record, make_request, make_status

SLOW = tuple(3 * each for each in COSTS.coefficients)
NUM_EXPLORED = 6
NUM_DECISIONS = NUM_EXPLORED * NUM_PER_EXPLORED


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def new_fleet(clock: Clock, **coefficients: tuple[float, ...]) -> Fleet:
    """p0 is slow; p1, p2 and d0 are not."""
    fleet = Fleet(now=clock)
    for name in ("p0", "p1", "p2", "d0"):
        join(fleet, name, coefficients.get(name, SLOW if name == "p0" else COSTS.coefficients))
    return fleet


def join(fleet: Fleet, name: str, coefficients: tuple[float, ...]) -> None:
    costs = StepCosts(coefficients, 100, 0.0, 10)
    fleet.worker_synced(make_record(name), [], make_status(step_costs=costs))


def report(
    fleet: Fleet, name: str, coefficients: tuple[float, ...], num_steps: int, num_prompts: int
) -> None:
    costs = StepCosts(coefficients, num_steps, 0.0, num_prompts)
    fleet.worker_stepped(name, (), make_status(step_costs=costs))


def chosen(
    fleet: Fleet,
    clock: Clock,
    exclude: Collection[str] = (),
    ttft_slo_s: float = 100.0,
    seed: int = 0,
) -> Counter[str]:
    """How often each worker computes a long prompt."""
    rng, found = random.Random(seed), Counter[str]()
    for _ in range(NUM_DECISIONS):
        told = fleet.view(), fleet.index, clock.now_s, rng, exclude, ttft_slo_s
        route = choose_route(make_request(4000), *told)
        found[route.prefill or route.decode] += 1
        fleet.release(fleet.reserve("d0", RequestLoad(10)))
    return found


def test_who_seems_slow_and_is_silent_is_explored_until_it_computes_a_prompt() -> None:
    clock = Clock()
    fleet = new_fleet(clock)
    assert chosen(fleet, clock)["p0"] == 0, "it has spoken a moment ago"
    clock.now_s += SILENT_S
    assert chosen(fleet, clock)["p0"] == NUM_EXPLORED
    report(fleet, "p0", SLOW, 100, 10)
    assert chosen(fleet, clock)["p0"] > 0, "it said nothing new"
    report(fleet, "p0", SLOW, 101, 11)
    assert chosen(fleet, clock)["p0"] == 0
    clock.now_s += SILENT_S
    assert chosen(fleet, clock)["p0"] > 0


def test_who_is_not_slow_or_not_allowed_is_not_explored() -> None:
    clock = Clock()
    alike = new_fleet(clock, p0=COSTS.coefficients)
    slow = new_fleet(clock)
    clock.now_s += SILENT_S
    assert min(chosen(alike, clock)[name] for name in ("p0", "p1", "p2")) > NUM_DECISIONS / 4
    assert chosen(slow, clock, exclude={"p0"})["p0"] == 0


def test_who_has_prompts_already_is_not_explored() -> None:
    """It may hang, or take long for a prompt with which it is explored; more would only wait."""
    clock = Clock()
    fleet = new_fleet(clock)
    clock.now_s += SILENT_S
    prompt = fleet.reserve("p0", RequestLoad(4000))
    assert chosen(fleet, clock)["p0"] == 0
    fleet.release(prompt)
    assert chosen(fleet, clock)["p0"] > 0


def test_it_is_explored_also_if_its_prompts_seem_to_miss_their_slo() -> None:
    """Else a worker whose prior is far too slow would never correct it."""
    clock = Clock()
    fleet = new_fleet(clock, p0=tuple(1000 * each for each in COSTS.coefficients))
    clock.now_s += SILENT_S
    assert chosen(fleet, clock, ttft_slo_s=2.0)["p0"] > 0


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_decode_worker_is_explored_if_its_prompts_seem_slower_than_its_gpu_is(
    factor: float,
) -> None:
    """It reports decode steps all the time, and none of these could correct the rest."""
    clock = Clock()
    on_slow_gpu = tuple(factor * each for each in COSTS.coefficients)
    per_step_s, per_token_s, *others = on_slow_gpu
    wrong = (per_step_s, 20 * per_token_s, *others)
    found = []
    for its in (on_slow_gpu, wrong):
        fleet = new_fleet(clock, p0=COSTS.coefficients, d0=its)
        clock.now_s += SILENT_S
        report(fleet, "d0", its, 101, 10)
        found.append(chosen(fleet, clock)["d0"])
        costs = StepCosts(its, 102, 0.0, 10)
        fleet.worker_stepped("d0", (), make_status(num_running=3, step_costs=costs))
        assert chosen(fleet, clock)["d0"] == 0, "a prompt would delay its streams"
    assert found[0] == 0 and found[1] > 0


def test_of_several_the_one_that_was_silent_for_longest_is_explored() -> None:
    clock = Clock()
    fleet = new_fleet(clock)
    clock.now_s += 1.0
    join(fleet, "p3", SLOW)
    clock.now_s += SILENT_S
    found = chosen(fleet, clock)
    assert found["p0"] > 0 and found["p3"] == 0
    report(fleet, "p0", SLOW, 101, 11)
    found = chosen(fleet, clock)
    assert found["p0"] == 0 and found["p3"] > 0


def test_a_slow_worker_of_a_large_pool_is_found() -> None:
    clock = Clock()
    fleet = new_fleet(clock)
    for number in range(100):
        join(fleet, f"p-more{number}", COSTS.coefficients)
    clock.now_s += SILENT_S
    # One of 103 is compared in a ninth of the decisions that explore.
    assert any(chosen(fleet, clock, seed=seed)["p0"] for seed in range(20))


def test_a_worker_that_has_left_is_forgotten() -> None:
    clock = Clock()
    fleet = new_fleet(clock)
    clock.now_s += SILENT_S
    fleet.worker_lost("p0")
    report(fleet, "p0", SLOW, 5, 5)  # late news
    assert chosen(fleet, clock)["p0"] == 0
    join(fleet, "p0", SLOW)
    assert chosen(fleet, clock)["p0"] == 0, "a new worker of that name has just spoken"
