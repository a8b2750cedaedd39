"""The autoscaler where something is unusual: starts of minutes, a day without requests, workers
that never start, a limit that two pools share, figures that are missing."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from disagg.router.autoscale import Autoscaler
from disagg.router.load_report import PoolState, RequestTotals
from disagg.router.replay import prefill_ttft_s
from tests.router.test_autoscale import (
    DECODE,
    PREFILL,
    TIMES,
    Played,
    asked,
    limits,
    slices,
    tier,
)


def test_a_worker_that_takes_minutes_to_start_is_not_stopped_before_it_serves() -> None:
    slow = limits(start_s=200.0, look_back_s=300.0, down_after_s=30.0)
    played = Played(tier(slow, limits()))
    for _ in range(60):
        calm = played.second(asked(2.0))
    for _ in range(60):
        burst = played.second(asked(30.0))
    assert burst[PREFILL] > calm[PREFILL]
    after = [played.second(asked(2.0))[PREFILL] for _ in range(200)]
    assert min(after) == burst[PREFILL]
    assert played.later(300, asked(2.0))[PREFILL] == calm[PREFILL]


def test_a_day_without_requests_costs_the_least_and_leaves_no_memory() -> None:
    played = Played(tier(limits(0), limits(1)))
    for _ in range(60):
        played.second(asked(30.0))
    for _ in range(3):  # the pool sleeps, wakes for one request, and sleeps again
        assert played.later(24 * 3600, asked(0.0)) == {PREFILL: 0, DECODE: 1}
        played.now += 24 * 3600
        assert played.second(asked(1.0))[PREFILL] == 1
    assert len(played.scaler._slices["tier"]) <= 2


def test_workers_that_never_start_are_not_asked_for_again_and_again() -> None:
    """Serve goes on trying. The queue grows, and no size above what the load needs would help."""
    scaler = Autoscaler([tier(limits(1, 64), limits())])
    number, numbers = 1, []
    for second in range(120):
        now = float(second)
        scaler.observe("tier", now, 1.0, asked(20.0))
        states = {
            # As many as were asked for count as present. Admission keeps the queue of the one that
            # runs as short as the SLO.
            PREFILL: PoolState(number, TIMES, num_queued_tokens=5000.0),
            DECODE: PoolState(1, TIMES),
        }
        number = scaler.decide(now, states)[PREFILL].num_workers  # type: ignore[arg-type, index]
        numbers.append(number)
    assert len(set(numbers[60:])) == 1


@pytest.mark.parametrize("seed", range(2))
def test_two_pools_do_not_take_the_last_worker_from_each_other_all_the_time(seed: int) -> None:
    """Under a limit that is too small for both, with a load that is counted unevenly."""
    rng = random.Random(seed)
    config = tier(ttft_slo_s=0.2, tpot_slo_s=0.013)
    played = Played(config, budget=6)
    sizes = []
    for _ in range(300):
        rate = rng.uniform(30.0, 50.0)
        sizes.append(played.second(asked(rate, answer=100.0)))
    assert all(sum(each.values()) == 6 for each in sizes[60:])
    num_moves = sum(before != after for before, after in pairwise(sizes[60:]))
    assert num_moves <= 4  # a pool gives a worker back after `down_after_s` at the earliest


def test_figures_that_are_missing_stop_no_worker_in_use() -> None:
    """The ingress lost its links to all workers: neither load nor step times are known."""
    played = Played(tier())
    for _ in range(60):
        before = played.second(asked(20.0))
    for second in range(60):
        now = played.now + 1.0 + second
        played.scaler.observe("tier", now, 1.0, asked(20.0))
        states = {pool: PoolState(before[pool]) for pool in (PREFILL, DECODE)}
        decided = played.scaler.decide(now, states)  # type: ignore[arg-type]
    assert {pool: decided[pool].num_workers for pool in before} == before  # type: ignore[index]


def test_of_prompts_of_unlike_lengths_fewer_are_refused() -> None:
    """The long ones are, and each makes room for several short ones."""
    load = slices([30.0, *[1.0] * 9])
    even = [
        msgspec.structs.replace(each, asked=each.asked._replace(num_squared_tokens=squared))
        for each in load
        for squared in [each.asked.num_requests * 1000.0**2]
    ]
    unlike = [
        msgspec.structs.replace(each, asked=each.asked._replace(num_squared_tokens=2 * squared))
        for each in load
        for squared in [each.asked.num_requests * 1000.0**2]
    ]
    assert even[0].asked.length_variability == 0.0
    assert unlike[0].asked.length_variability == 1.0
    sizes = [
        next(n for n in range(1, 99) if prefill_ttft_s(each, TIMES, n, 0.5) <= 0.5)
        for each in (load, even, unlike)
    ]
    assert sizes[0] == sizes[1] >= sizes[2]  # unknown squares count as even


def test_workers_kept_for_repeated_bursts_are_as_many_as_all_of_it_needs() -> None:
    """Bursts that come again keep workers through the pauses, but no more than serve 95 % of
    `look_back_s` in time: once there are many calm seconds, that is fewer than a burst needs."""
    played = Played(tier(limits(look_back_s=300.0, down_after_s=10.0)))
    for _ in range(3):
        for _ in range(7):
            burst = played.second(asked(30.0))
        for _ in range(40):
            pause = played.second(asked(2.0))
    assert pause[PREFILL] > 1
    for _ in range(170):  # the bursts are a smaller and smaller share
        pause = played.second(RequestTotals(20.0, 20 * 100.0, 0.0, 20 * 10.0))
    assert pause[PREFILL] < burst[PREFILL]
