"""The view shows what workers report and what is on its way to them, nothing twice for long."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages import KVEvent, StepCosts
from disagg.router.fleet import NUM_STATUSES_UNTIL_SEEN, Fleet, Reservation
from disagg.router.worker_view import RequestLoad, WorkerView
from disagg.time_model import StepTimeModel
from tests.grids import examples
from tests.router.fakes import (
    COSTS,
    held_by,
    make_fleet,
    make_record,
    make_request,
    make_status,
)


def worker(fleet: Fleet, worker_id: str = "d0") -> WorkerView:
    return fleet.view().workers[worker_id]


def test_a_worker_is_in_the_view_from_its_snapshot_to_its_loss() -> None:
    fleet = Fleet()
    assert fleet.view().workers == {}
    fleet.worker_synced(make_record("d0"), [], make_status())
    assert set(fleet.view().workers) == {"d0"}
    fleet.worker_lost("d0")
    fleet.worker_lost("d0")
    assert fleet.view().workers == {}


def test_workers_are_in_the_order_in_which_they_came() -> None:
    """Where ties are decided by it, a simulation that is run again decides them as before."""
    names = [f"d{number}" for number in range(40)]
    fleet = make_fleet(*names)
    for name in reversed(names):
        fleet.worker_stepped(name, (), make_status(num_running=1))
    assert list(fleet.view().workers) == names


@examples(33)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["speak", "reserve", "sent", "release", "return"]), st.integers(0, 5)
        ),
        max_size=30,
    )
)
def test_the_view_is_current_after_whatever_happened(happened: list[tuple[str, int]]) -> None:
    names = ["p0", "d0"]
    fleet = make_fleet(*names)
    statuses = {name: make_status() for name in names}
    num_heard = Counter[str]()
    coming: list[tuple[str, Reservation]] = []
    ended: list[tuple[str, Reservation]] = []  # may be ended once more
    counts_until: dict[Reservation, int] = {}  # so many reports of its worker
    for what, number in happened:
        name = names[number % 2]
        if what == "speak":
            statuses[name] = make_status(num_running=number, num_context_tokens=10 * number)
            fleet.worker_stepped(name, (), statuses[name])
            num_heard[name] += 1
            ended += [
                (goal, each)
                for goal, each in coming
                if num_heard[goal] >= counts_until.get(each, math.inf)
            ]
        elif what == "reserve":
            coming.append((name, fleet.reserve(name, RequestLoad(100 * number, 1, 150 * number))))
        elif coming and what == "sent":
            goal, each = coming[number % len(coming)]
            fleet.sent(each)
            counts_until[each] = num_heard[goal] + NUM_STATUSES_UNTIL_SEEN
        elif coming and what == "release":
            ended.append(coming[number % len(coming)])
            fleet.release(ended[-1][1])
        elif what == "return":  # as a new worker, to which nothing is under way
            fleet.worker_lost(name)
            fleet.worker_synced(make_record(name), [], statuses[name])
            num_heard[name] = 0
            ended += [(goal, each) for goal, each in coming if goal == name]
        coming = [each for each in coming if each not in ended]
        for _, each in ended:
            fleet.release(each)
        for name, seen in fleet.view().workers.items():
            loads = [each.load for goal, each in coming if goal == name]
            load = RequestLoad(
                sum(each.num_uncomputed_tokens for each in loads),
                len(loads),
                sum(each.num_context_tokens for each in loads),
            )
            times = StepTimeModel.from_costs(COSTS)
            told = make_record(name), statuses[name], load, times
            assert seen == WorkerView.from_status(*told, before=seen)


def test_a_worker_that_ran_no_step_is_taken_for_another_one_of_its_model() -> None:
    """Else the first one of a fast fleet gets all requests, and the others never learn."""
    fleet = Fleet()
    prior = StepTimeModel.of((0.5,) * 6)
    untried = make_status(step_costs=StepCosts(prior.coefficients, 0, 0.0))
    for name in ("p0", "p1", "d0"):
        fleet.worker_synced(make_record(name), [], untried)
    fleet.worker_synced(make_record("p9", model="other"), [], untried)
    assert worker(fleet, "p1").times == prior
    fleet.worker_stepped("p0", (), make_status(step_costs=COSTS))
    for name in ("p1", "d0"):  # also in the other pool: roles change no route of equal workers
        assert worker(fleet, name).times == StepTimeModel.from_costs(COSTS)
    assert worker(fleet, "p9").times == prior
    slower = StepCosts((1.0, *COSTS.coefficients[1:]), 1, 0.0)
    fleet.worker_stepped("p1", (), make_status(step_costs=slower))
    assert worker(fleet, "p1").times == StepTimeModel.from_costs(slower)
    assert worker(fleet, "p0").times == StepTimeModel.from_costs(COSTS)
    fleet.worker_synced(make_record("p2"), [], untried)
    fleet.worker_lost("p2")
    assert "p2" not in fleet.view().workers


def test_a_worker_on_a_slower_gpu_is_not_taken_for_a_fast_one_before_its_first_step() -> None:
    """What a neighbour's steps say of its prior holds for the other's prior, too."""
    fleet = Fleet()
    for name, seconds in (("d-fast", 1e-3), ("d-slow", 3e-3)):
        prior = StepCosts((seconds,) * 6, 0, 0.0)
        fleet.worker_synced(make_record(name), [], make_status(step_costs=prior))
    learned = StepCosts((2e-3, 2e-3, 1e-3, 1e-3, 1e-3, 1e-3), 8, 0.0)
    fleet.worker_stepped("d-fast", (), make_status(step_costs=learned))
    assert worker(fleet, "d-fast").times == StepTimeModel.from_costs(learned)
    scaled = worker(fleet, "d-slow").times.coefficients
    assert scaled == pytest.approx((6e-3, 6e-3, 3e-3, 3e-3, 3e-3, 3e-3))


def test_events_and_losses_reach_the_index() -> None:
    request = make_request(64)
    fleet = make_fleet("d0", "d1", held={"d0": list(request.block_hashes)})
    fleet.worker_stepped("d1", [KVEvent("stored", request.block_hashes[:2])], make_status())
    assert held_by(fleet.index, request.block_hashes) == {"d0": 4, "d1": 2}
    fleet.worker_lost("d0")
    fleet.worker_stepped("d0", [KVEvent("stored", request.block_hashes)], make_status())
    assert held_by(fleet.index, request.block_hashes) == {"d1": 2}


def test_a_view_speaks_the_workers_own_costs() -> None:
    fleet = Fleet()
    fleet.worker_synced(make_record("d0"), [], make_status(step_costs=None))
    assert worker(fleet).times == StepTimeModel()
    fleet.worker_stepped("d0", (), make_status())
    assert worker(fleet).times == StepTimeModel.of(COSTS.coefficients)


def test_a_reservation_counts_at_once_and_until_release() -> None:
    fleet = make_fleet("d0")
    first = fleet.reserve("d0", RequestLoad(100, 1, 160))
    fleet.reserve("d0", RequestLoad(50, 1, 10))
    seen = worker(fleet)
    assert (seen.num_uncomputed_tokens, seen.num_decoding, seen.num_context_tokens) == (150, 2, 170)
    assert seen.num_waiting == 1
    assert seen.num_free_blocks == 1000 - 11
    fleet.release(first)
    fleet.release(first)
    assert worker(fleet).num_uncomputed_tokens == 50


def test_a_reservation_ends_when_reports_must_contain_it() -> None:
    fleet = make_fleet("d0")
    reservation = fleet.reserve("d0", RequestLoad(100))
    for _ in range(2 * NUM_STATUSES_UNTIL_SEEN):
        fleet.worker_stepped("d0", (), make_status())
    assert worker(fleet).num_uncomputed_tokens == 100  # it has not been sent yet
    fleet.sent(reservation)
    for _ in range(NUM_STATUSES_UNTIL_SEEN - 1):
        fleet.worker_stepped("d0", (), make_status(num_uncomputed_tokens=100))
        assert worker(fleet).num_uncomputed_tokens == 200
    fleet.worker_stepped("d0", (), make_status(num_uncomputed_tokens=100))
    assert worker(fleet).num_uncomputed_tokens == 100
    fleet.release(reservation)
    assert worker(fleet).num_uncomputed_tokens == 100


def test_a_step_began_when_a_worker_spoke_or_with_the_first_request_for_an_idle_one() -> None:
    now = 10.0
    fleet = Fleet(now=lambda: now)
    fleet.worker_synced(make_record("d0"), [], make_status())
    now = 20.0
    fleet.reserve("d0", RequestLoad(100, 1, 100))
    now = 20.5
    fleet.reserve("d0", RequestLoad(100, 1, 100))
    assert worker(fleet).began_s == 20.0
    now = 21.0
    fleet.worker_stepped("d0", (), make_status(num_running=2, num_context_tokens=200))
    now = 22.0
    fleet.reserve("d0", RequestLoad(100, 1, 100))
    assert worker(fleet).began_s == 21.0


def test_a_lost_workers_reservations_go_with_it() -> None:
    fleet = make_fleet("d0")
    reservation = fleet.reserve("d0", RequestLoad(100))
    fleet.worker_lost("d0")
    fleet.worker_synced(make_record("d0", epoch=2), [], make_status())
    assert worker(fleet).num_uncomputed_tokens == 0
    fleet.release(reservation)
    with pytest.raises(KeyError):
        fleet.reserve("gone", RequestLoad(1))
