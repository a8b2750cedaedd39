"""Pools of a simulation grow, drain and cost what they cost, the same in each run."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from disagg.config import AutoscalingConfig
from disagg.router.autoscale import Autoscaler, PoolTarget
from disagg.router.load_report import PoolState
from disagg.router.worker_view import Pool
from disagg.tools.sim.config import MODEL, SimConfig
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest


def limits(least: int, most: int, start_s: float = 3.0) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        start_s=start_s,
        look_back_s=20.0,
        down_after_s=5.0,
        slo_fraction=0.5,
    )


# A little, then much for 20 s, and a little again.
LOAD = [
    TraceRequest(begins + second, 2000, 20)
    for begins, every in ((0.0, 3.0), (15.0, 0.03), (35.0, 3.0))
    for second in (every * number for number in range(int(20 / every)))
]
SMALL = SimConfig(num_prefill=1, num_decode=1, ttft_slo_s=1.0, tpot_slo_s=0.05)
SCALED = msgspec.structs.replace(SMALL, scale_prefill=limits(1, 4), scale_decode=limits(1, 2))


@cache
def played(config: SimConfig) -> SimReport:
    """`LOAD` on a fleet, once for all tests."""
    return simulate(config, LOAD)


def test_two_runs_are_equal_to_the_bit() -> None:
    assert simulate(SCALED, LOAD) == played(SCALED)


def test_more_is_in_time_than_with_the_least_for_less_than_with_the_most() -> None:
    least = played(SMALL)
    most = simulate(msgspec.structs.replace(SMALL, num_prefill=4, num_decode=2), LOAD)
    scaled = played(SCALED)
    assert least.num_failed == scaled.num_failed == most.num_failed == 0
    assert least.in_time_percent < scaled.in_time_percent
    assert least.worker_hours < scaled.worker_hours < most.worker_hours
    assert least.worker_hours == pytest.approx(2 * least.duration_s / 3600, rel=0.05)


def test_workers_that_start_slowly_help_later_and_are_paid_meanwhile() -> None:
    soon = played(SCALED)
    late = simulate(msgspec.structs.replace(SCALED, scale_prefill=limits(1, 4, start_s=12.0)), LOAD)
    assert late.in_time_percent < soon.in_time_percent
    assert late.worker_hours > 1.05 * played(SMALL).worker_hours


def test_a_pool_is_a_second_later_as_large_as_the_autoscaler_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool: Pool = (MODEL, "prefill")
    targets, sizes = [3, 1, 4, 4, 2], list[int]()

    def decide(
        autoscaler: Autoscaler, now: float, states: dict[Pool, PoolState]
    ) -> dict[Pool, PoolTarget]:
        sizes.append(states[pool].num_workers)
        return {pool: PoolTarget(targets[min(len(sizes), len(targets)) - 1], 0.0, 1.0)}

    monkeypatch.setattr(Autoscaler, "decide", decide)
    simulate(SCALED, [TraceRequest(float(second), 500, 5) for second in range(10)])
    assert sizes[:6] == [1, *targets]


def test_a_worker_that_leaves_takes_nothing_along() -> None:
    """Its streams go on elsewhere with their KV, although it has no time to end them."""
    calm = [TraceRequest(60.0 + number, 100, 5) for number in range(120)]
    long = [TraceRequest(0.2 * number, 2000, 8000) for number in range(60)]
    config = msgspec.structs.replace(
        SMALL, tpot_slo_s=0.0085, scale_decode=limits(1, 3), num_blocks=4096
    )
    report = simulate(config, [*long, *calm])
    assert report.num_failed == 0
    wanted = sum(each.num_output_tokens for each in [*long, *calm])
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(wanted)


def test_a_pool_sleeps_and_wakes() -> None:
    rare = [TraceRequest(100.0 * number, 500, 5) for number in range(4)]
    config = msgspec.structs.replace(SMALL, scale_prefill=limits(0, 1), scale_decode=limits(0, 1))
    report = simulate(config, rare)
    assert report.num_failed == 0
    assert report.ttft_p99_s == pytest.approx(4.0, abs=1.5)  # a look, and a start of 3 s
    assert report.worker_hours < 0.6 * simulate(SMALL, rare).worker_hours


def test_the_budget_holds_for_both_pools() -> None:
    config = msgspec.structs.replace(SCALED, max_num_workers=2)
    report = simulate(config, LOAD)
    assert report.worker_hours == pytest.approx(played(SMALL).worker_hours, rel=0.02)
