"""A tenant that floods a fleet, and one that does not: whom it costs what."""

from __future__ import annotations

import random

import msgspec
import pytest

from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.report import SimReport, TenantReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest
from tests.grids import some

SECONDS = 12.0
BASE = SimConfig(num_prefill=2, num_blocks=256, max_num_seqs=32)
# With the flood, of the 95 % fastest first tokens beside what they take on a fleet without it.
WORST_FACTOR = 8.0
FLOOD_PER_S = 60.0  # 2.6 times what the larger of the fleets can do


def load(per_s: dict[str, float], seconds: float = SECONDS) -> list[TraceRequest]:
    sizes = {"heavy": (2000, 64), "light": (1000, 64)}
    requests = []
    for name, rate in per_s.items():
        rng, now = random.Random(name), 0.0
        while (now := now + rng.expovariate(rate)) < seconds:
            requests.append(TraceRequest(now, *sizes[name], (), name))
    return sorted(requests, key=lambda each: each.arrival_s)


def of(tenant: str, report: SimReport) -> TenantReport:
    return next(each for each in report.tenants if each.tenant == tenant)


@pytest.mark.parametrize("num_decode", some([2], [0]))
def test_a_flood_costs_whoever_floods(num_decode: int) -> None:
    fleet = msgspec.structs.replace(BASE, num_decode=num_decode)
    fair = msgspec.structs.replace(fleet, fair_queue=True)
    alone = simulate(fair, load({"light": 3.0}))
    flood = load({"light": 3.0, "heavy": FLOOD_PER_S})
    report = simulate(fair, flood)
    assert of("light", report).num_failed == 0
    assert of("light", report).ttft_p95_s <= WORST_FACTOR * alone.ttft_p95_s
    # The negative control, and that fairness costs no throughput.
    unfair = simulate(fleet, flood)
    assert of("light", unfair).ttft_p95_s > 10 * WORST_FACTOR * alone.ttft_p95_s
    assert report.requests_per_s > 0.97 * unfair.requests_per_s


def test_two_floods_are_equal_to_the_bit() -> None:
    fair = msgspec.structs.replace(BASE, num_decode=2, fair_queue=True)
    flood = load({"light": 3.0, "heavy": FLOOD_PER_S}, seconds=4.0)
    report = simulate(fair, flood)
    assert report.ttft_p99_s > 2.0, "nobody waited"
    assert report == simulate(fair, flood)


def test_a_flood_is_told_to_come_back_and_who_is_taken_in_is_in_time() -> None:
    slo_s = 4.0
    fair = msgspec.structs.replace(BASE, num_decode=2, fair_queue=True, ttft_slo_s=slo_s)
    report = simulate(fair, load({"light": 3.0, "heavy": FLOOD_PER_S}))
    assert of("light", report).num_failed == 0
    assert of("heavy", report).num_failed > 0.15 * of("heavy", report).num_requests
    assert report.ttft_p95_s <= slo_s
    assert report.utilisation > 0.9


def test_without_a_queue_at_the_workers_nothing_is_different() -> None:
    fleet = msgspec.structs.replace(BASE, num_decode=2)
    calm = load({"light": 1.0, "heavy": 2.0})
    assert simulate(msgspec.structs.replace(fleet, fair_queue=True), calm) == simulate(fleet, calm)
