"""Up to three times what a fleet can do: who is taken in is served in time, the rest is refused."""

from __future__ import annotations

import random

import msgspec
import pytest

from disagg.time_model import StepFeatures, StepTimeModel
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest

SLO_S = 2.0
SECONDS = 30.0
PRIOR = StepTimeModel(8e-3, 1e-4, 1e-8, 4e-4, 2e-7, 4e-3)


class NoisySteps:
    """Steps that take up to 15 % more or less than workers learn, as on a real machine."""

    def __init__(self) -> None:
        self._rng = random.Random(2)

    def step_s(self, features: StepFeatures, /) -> float:
        return PRIOR.step_s(features) * self._rng.uniform(0.85, 1.15)


FLEET = SimConfig(
    num_prefill=2,
    num_decode=0,
    num_blocks=1000,
    block_size=16,
    max_num_seqs=32,
    times=PRIOR,
    fair_queue=True,
    ttft_slo_s=SLO_S,
)
# Requests per second, prompt tokens, mean answer tokens. So much that less than a half can be
# served, and about a third where only one resource is short.
Traffic = tuple[float, int, int]
PROMPTS: list[Traffic] = [(75.0, 800, 5)]  # short of computing
ANSWERS: list[Traffic] = [(45.0, 50, 200)]  # short of places in the batch
LONG_ANSWERS: list[Traffic] = [(12.0, 600, 500)]  # short of blocks: sequences outgrow the cache
ALL: list[Traffic] = [(30.0, 700, 20), (10.0, 60, 300), (2.0, 3000, 60)]


def play(traffic: list[Traffic], factor: float = 1.0, **changes: object) -> SimReport:
    rng, requests = random.Random(1), []
    for per_s, num_prompt, num_answer in traffic:
        now = rng.expovariate(factor * per_s)
        while now < SECONDS:
            # The first half shows how far off predictions are.
            half = "learning" if now < SECONDS / 2 else "learned"
            num_output = 1 + rng.randrange(2 * num_answer)
            requests.append(TraceRequest(now, num_prompt, num_output, (), half))
            now += rng.expovariate(factor * per_s)
    requests.sort(key=lambda each: each.arrival_s)
    return simulate(msgspec.structs.replace(FLEET, steps=NoisySteps(), **changes), requests)


@pytest.mark.parametrize(
    "traffic",
    [PROMPTS, ANSWERS, LONG_ANSWERS, ALL],
    ids=["prompts", "answers", "long answers", "all"],
)
def test_accepted_requests_keep_their_slo_and_the_surplus_is_refused(
    traffic: list[Traffic],
) -> None:
    report = play(traffic)
    learned = next(each for each in report.tenants if each.tenant == "learned")
    assert learned.ttft_p95_s <= SLO_S
    assert 50.0 < report.refused_percent < 90.0


def test_nobody_is_refused_by_a_fleet_that_has_time() -> None:
    report = play(ALL, factor=0.15)
    assert report.num_failed == 0 and report.ttft_p95_s < SLO_S


def test_refusing_costs_no_throughput() -> None:
    """What is served under overload is what the same fleet serves when it lets all wait."""
    traffic = [(20.0, 50, 200)]
    all_wait = play(traffic, ttft_slo_s=1e6)
    assert play(traffic).output_tokens_per_s > 0.85 * all_wait.output_tokens_per_s
    assert all_wait.ttft_p95_s > 5 * SLO_S, "the negative control"
