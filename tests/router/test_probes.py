from __future__ import annotations

import pytest

from disagg.messages import StepCosts
from disagg.router.fleet import Fleet
from disagg.router.probes import NUM_LOOKED_AT, NUM_PER_PROBE, SILENT_S
from disagg.router.worker_view import RequestLoad
from tests.router.fakes import COSTS, make_record, make_status

SLOW = tuple(3 * each for each in COSTS.coefficients)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet_of(clock: Clock) -> Fleet:
    """p0 is slow; p1, p2 and d0 are not."""
    fleet = Fleet(now=clock)
    for name in ("p0", "p1", "p2", "d0"):
        costs = StepCosts(SLOW, 100, 0.0) if name == "p0" else COSTS
        fleet.worker_synced(make_record(name), [], make_status(step_costs=costs))
    return fleet


def believed(fleet: Fleet, worker_id: str) -> tuple[float, ...]:
    return fleet.view().workers[worker_id].times.coefficients


def reserve(fleet: Fleet, number: int) -> None:
    for _ in range(number):
        fleet.release(fleet.reserve("p1", RequestLoad(10)))


def speak(fleet: Fleet, num_observed: int, *names: str) -> None:
    for name in names:
        its = SLOW if name == "p0" else COSTS.coefficients
        costs = StepCosts(its, num_observed, 0.0, num_observed)
        fleet.worker_stepped(name, (), make_status(step_costs=costs))


def test_who_was_silent_for_long_is_believed_to_be_fast_until_it_speaks() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    clock.now_s += SILENT_S
    speak(fleet, 101, "p1", "p2", "d0")
    reserve(fleet, NUM_PER_PROBE - 1)
    assert believed(fleet, "p0") == SLOW
    reserve(fleet, 1)
    assert believed(fleet, "p0") == COSTS.coefficients
    fleet.worker_stepped("p0", (), make_status(step_costs=StepCosts(SLOW, 100, 0.0)))
    assert believed(fleet, "p0") == COSTS.coefficients, "it said nothing new"
    speak(fleet, 101, "p0")
    assert believed(fleet, "p0") == SLOW
    reserve(fleet, 2 * NUM_PER_PROBE)
    assert believed(fleet, "p0") == SLOW, "that is what it said a moment ago"
    clock.now_s += SILENT_S
    speak(fleet, 102, "p1", "p2", "d0")
    reserve(fleet, NUM_PER_PROBE)
    assert believed(fleet, "p0") == COSTS.coefficients


@pytest.mark.parametrize("num_slower", [1, 5])
def test_a_decode_worker_without_prompts_is_believed_to_compute_them_like_the_fastest(
    num_slower: int,
) -> None:
    """It reports decode steps all the time, and none of these could correct the rest."""
    clock = Clock()
    fleet = fleet_of(clock)
    steps, prompts = COSTS.coefficients, (num_slower * 0.8e-2, 2e-3, 1e-5, 3e-4, 1e-6, 0.5)
    fleet.worker_synced(make_record("d1"), [], make_status(step_costs=StepCosts(prompts, 5, 0.0)))

    def decode(num_observed: int, num_prompts: int = 0) -> None:
        costs = StepCosts(prompts, num_observed, 0.0, num_prompts)
        fleet.worker_stepped("d1", (), make_status(step_costs=costs))

    clock.now_s += SILENT_S / 2
    speak(fleet, 101, "p0", "p1", "p2", "d0")
    clock.now_s += SILENT_S / 2
    decode(6)
    assert believed(fleet, "d1") == prompts
    reserve(fleet, NUM_PER_PROBE)
    for num_observed in (7, 8):
        its = believed(fleet, "d1")
        assert (its[0], *its[3:5]) == (prompts[0], *prompts[3:5]), "its decode steps are known"
        factor = max(1.0, num_slower * 0.8)
        assert its[1:3] == pytest.approx([factor * seconds for seconds in steps[1:3]])
        assert its[0] + its[5] == pytest.approx(factor * (steps[0] + steps[5]))
        decode(num_observed)
    decode(9, num_prompts=1)
    assert believed(fleet, "d1") == prompts


def test_time_alone_makes_no_probe() -> None:
    """A fleet that serves one request a minute would send it to a slow worker each time."""
    clock = Clock()
    fleet = fleet_of(clock)
    clock.now_s += 1000 * SILENT_S
    reserve(fleet, NUM_PER_PROBE - 1)
    assert believed(fleet, "p0") == SLOW


def test_who_gets_no_request_in_spite_of_its_credit_keeps_nobody_else_from_a_probe() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    costs = StepCosts(SLOW, 100, 0.0)
    clock.now_s += 1.0
    fleet.worker_synced(make_record("p3"), [], make_status(step_costs=costs))
    clock.now_s += SILENT_S
    speak(fleet, 101, "p1", "p2", "d0")
    for believed_of_p3 in (SLOW, COSTS.coefficients):
        reserve(fleet, NUM_PER_PROBE)
        assert believed(fleet, "p0") == COSTS.coefficients
        assert believed(fleet, "p3") == believed_of_p3


def test_a_worker_that_has_left_is_forgotten() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    clock.now_s += SILENT_S
    speak(fleet, 101, "p1", "p2", "d0")
    reserve(fleet, NUM_PER_PROBE)
    assert believed(fleet, "p0") == COSTS.coefficients
    fleet.worker_lost("p0")
    speak(fleet, 5, "p0")  # late news
    reserve(fleet, NUM_PER_PROBE)
    assert "p0" not in fleet.view().workers
    costs = StepCosts(SLOW, 100, 0.0)
    fleet.worker_synced(make_record("p0"), [], make_status(step_costs=costs))
    assert believed(fleet, "p0") == SLOW, "a new worker of that name has no credit"


@pytest.mark.parametrize("num_slow", [1, 150])
def test_the_yardstick_is_the_fastest_of_a_large_pool_wherever_it_is(num_slow: int) -> None:
    """The first workers have slower GPUs; nobody may depend on the order in which they came."""
    clock = Clock()
    fleet = Fleet(now=clock)
    names = [f"p{number}" for number in range(200)]
    slow = {*names[:num_slow], "p180"}

    def speak_all(num_observed: int, silent: str = "") -> None:
        for name in names:
            its = SLOW if name in slow else COSTS.coefficients
            status = make_status(step_costs=StepCosts(its, num_observed, 0.0, num_observed))
            if name not in fleet.view().workers:
                fleet.worker_synced(make_record(name), [], status)
            elif name != silent:
                fleet.worker_stepped(name, (), status)

    speak_all(100)
    clock.now_s += SILENT_S
    speak_all(101, silent="p180")
    reserve(fleet, NUM_PER_PROBE)
    assert believed(fleet, "p180") == COSTS.coefficients


def test_workers_that_are_not_slow_take_no_turns_of_the_slow_one() -> None:
    """Hundreds of decode workers may never get a prompt."""
    clock = Clock()
    fleet = Fleet(now=clock)
    for number in range(300):
        fleet.worker_synced(make_record(f"d{number}"), [], make_status())
    status = make_status(step_costs=StepCosts(SLOW, 100, 0.0))
    fleet.worker_synced(make_record("p0"), [], status)
    fleet.worker_synced(make_record("p1"), [], make_status())
    clock.now_s += SILENT_S
    reserve(fleet, NUM_PER_PROBE)
    assert believed(fleet, "p0") == SLOW
    for _ in range(300 // NUM_LOOKED_AT):
        reserve(fleet, NUM_PER_PROBE)
        fleet.view()
    assert believed(fleet, "p0") == COSTS.coefficients


def test_when_the_fastest_leaves_or_slows_down_the_others_are_the_yardstick() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    fast = tuple(0.5 * each for each in COSTS.coefficients)
    for name, its in (("p3", fast), ("p4", fast)):
        status = make_status(step_costs=StepCosts(its, 100, 0.0))
        fleet.worker_synced(make_record(name), [], status)
    fleet.worker_lost("p4")
    fleet.worker_stepped("p3", (), make_status(step_costs=StepCosts(SLOW, 101, 0.0, 101)))
    clock.now_s += SILENT_S
    speak(fleet, 101, "p1", "p2", "d0")
    reserve(fleet, NUM_PER_PROBE)
    assert believed(fleet, "p0") == COSTS.coefficients


def test_a_prior_is_no_yardstick() -> None:
    """A new worker reports what was predicted for it; its pool has measured something else."""
    clock = Clock()
    fleet = fleet_of(clock)
    prior = tuple(0.1 * each for each in COSTS.coefficients)
    fleet.worker_synced(make_record("p3"), [], make_status(step_costs=StepCosts(prior, 0, 0.0)))
    clock.now_s += SILENT_S
    speak(fleet, 101, "p1", "p2", "d0")
    reserve(fleet, NUM_PER_PROBE)
    assert believed(fleet, "p0") == COSTS.coefficients
