"""The product's own judge and escalation, over tiers of simulated workers."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from disagg.blocks import HASH_NBYTES
from disagg.config import AutoscalingConfig
from disagg.engine.sched.sequence import Sequence
from disagg.errors import RequestError
from disagg.messages import GenerateRequest, SamplingParams
from disagg.tools.sim.answers import SimulatedConfidence
from disagg.tools.sim.config import LARGEST, Fault, SimConfig, SmallTier
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.report import SimReport, TierReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest

LOAD = make_load("conversations", 8.0, 60, seed=3)
ALONE = SimConfig(num_prefill=2, num_decode=2, num_blocks=96, max_num_seqs=8)


def with_small(unsure: float, **changes: object) -> SimConfig:
    small = SmallTier(name="small", size=0.125, unsure=unsure)
    return msgspec.structs.replace(ALONE, smaller=(small,), **changes)


@cache
def played(config: SimConfig) -> SimReport:
    """`LOAD` on a fleet, once for all tests."""
    return simulate(config, LOAD)


def tiers(config: SimConfig) -> dict[str, TierReport]:
    return {each.model: each for each in played(config).tiers}


def test_two_runs_are_equal_to_the_bit_and_another_seed_is_another_run() -> None:
    config = with_small(0.3)
    report = played(config)
    assert report == simulate(config, LOAD)
    assert report != played(msgspec.structs.replace(config, seed=1))
    assert (report.num_requests, report.num_failed) == (len(LOAD), 0)
    wanted = sum(each.num_output_tokens for each in LOAD)
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(wanted)
    assert played(ALONE).tiers == ()


@pytest.mark.parametrize("unsure", [0.0, 0.3, 1.0])
def test_so_many_are_escalated_as_the_small_model_is_unsure_of(unsure: float) -> None:
    by_model = tiers(with_small(unsure))
    small, largest = by_model["small"], by_model[LARGEST]
    assert small.num_asked == len(LOAD) == small.num_answered + largest.num_answered
    assert largest.num_asked == largest.num_answered
    assert small.escalated_percent == pytest.approx(100.0 * unsure, abs=10.0)
    if unsure in (0.0, 1.0):
        assert small.escalated_percent == 100.0 * unsure


def test_small_answers_come_sooner_and_cost_less() -> None:
    report, alone = played(with_small(0.3)), played(ALONE)
    small, largest = report.tiers
    assert small.ttft_p50_s < alone.ttft_p50_s < largest.ttft_p50_s
    assert small.tpot_p50_s < 0.2 * largest.tpot_p50_s
    assert played(with_small(0.0)).cost_percent == pytest.approx(12.5)
    assert 12.5 < report.cost_percent < 60.0 < played(with_small(1.0)).cost_percent
    assert report.worker_hours == pytest.approx(small.worker_hours + largest.worker_hours)
    assert small.busy_hours < largest.busy_hours


def test_a_draft_is_verified_in_the_prefill_step_of_the_large_model() -> None:
    """One request, alone: the seconds of each step by the time model, on both models."""
    num_prompt, num_output, num_judged = 1000, 30, 8
    small = SmallTier(name="small", size=0.25, unsure=1.0, num_decode=0)
    config = SimConfig(
        num_prefill=1, num_decode=0, smaller=(small,), num_judged_tokens=num_judged, seed=2
    )
    report = simulate(config, [TraceRequest(0.0, num_prompt, num_output)])
    sequence = Sequence(request(0, num_output))
    place, _ = SimulatedConfidence(config.cascade, {"small": 1.0}, config.seed).least(
        "small", sequence
    )
    assert 0 < place < num_judged, "choose another seed"
    of_small, of_large = config.times_of("small", "prefill"), config.times
    judged_s = of_small.prefill_s(num_prompt) + sum(
        of_small.decode_step_s(1, num_prompt + i) for i in range(1, place + 1)
    )
    num_draft = place + 1  # and the last token of it is wrong
    first_s = judged_s + of_large.prefill_s(num_prompt + num_draft)
    assert report.ttft_p50_s == pytest.approx(first_s)
    num_left = num_output - num_draft
    decode_s = sum(of_large.decode_step_s(1, num_prompt + num_draft + i) for i in range(num_left))
    assert report.tpot_p50_s * (num_output - 1) == pytest.approx(decode_s, rel=0.01)
    whole = num_prompt + num_output - 1
    expected = (0.25 * (num_prompt + place) + whole) / whole
    assert report.cost_percent == pytest.approx(100.0 * expected)


def request(number: int, num_output: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        model="small",
        token_ids=(number,),
        num_prompt_tokens=1,
        hash_root=bytes(HASH_NBYTES),
        block_hashes=(),
        sampling=SamplingParams(max_tokens=num_output),
        deadline_unix_s=0.0,
    )


def test_the_share_is_that_of_answers_below_the_threshold_and_places_differ() -> None:
    config = with_small(0.2)
    sureness = SimulatedConfidence(config.cascade, {"small": 0.2}, seed=0)
    drawn = [sureness.least("small", Sequence(request(i, 40))) for i in range(2000)]
    (threshold,) = config.cascade.thresholds
    assert sum(logprob < threshold for _, logprob in drawn) / 2000 == pytest.approx(0.2, abs=0.03)
    assert {place for place, _ in drawn} == set(range(config.num_judged_tokens))
    assert max(logprob for _, logprob in drawn) <= 0.0


def test_three_tiers_are_climbed_and_those_below_are_drafts() -> None:
    small = SmallTier(name="small", size=0.1, unsure=0.5)
    medium = SmallTier(name="medium", size=0.4, unsure=0.5)
    by_model = tiers(msgspec.structs.replace(ALONE, smaller=(small, medium)))
    assert list(by_model) == ["small", "medium", LARGEST]
    asked = [each.num_asked for each in by_model.values()]
    assert asked[0] == len(LOAD) > 1.5 * asked[1] > 2.0 * asked[2] > 0


def test_load_moves_the_threshold() -> None:
    """Where the large model is late, more of the small answers have to do."""
    crowded = with_small(0.5, speed=40.0, ttft_slo_s=0.2, num_prefill=1, num_decode=1)
    moved = msgspec.structs.replace(crowded, max_shift=1.0)
    assert tiers(moved)["small"].escalated_percent < tiers(crowded)["small"].escalated_percent - 5


@pytest.mark.parametrize("worker_id", ["small-prefill-0", "small-decode-0", "decode-1"])
def test_a_worker_of_either_tier_that_dies_costs_time_only(worker_id: str) -> None:
    fault = Fault(worker_id, at_s=20.0, for_s=10.0)
    report = simulate(with_small(0.3, faults=(fault,)), LOAD)
    assert report.num_failed == 0
    wanted = sum(each.num_output_tokens for each in LOAD)
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(wanted)


def test_pools_of_all_tiers_follow_the_load_within_one_budget() -> None:
    limits = AutoscalingConfig(min_replicas=1, max_replicas=4, start_s=2.0, look_back_s=20.0)
    small = SmallTier(name="small", size=0.5, unsure=0.5, scale_prefill=limits)
    free = SimConfig(
        num_prefill=1,
        num_decode=1,
        smaller=(small,),
        scale_prefill=limits,
        ttft_slo_s=0.3,
        tpot_slo_s=0.05,
        speed=40.0,
    )
    least = msgspec.structs.replace(free, max_num_workers=4)
    small_hours, large_hours = (each.worker_hours for each in played(free).tiers)
    fixed = played(least)
    assert [each.worker_hours for each in fixed.tiers] == pytest.approx(
        [2 * fixed.duration_s / 3600.0] * 2, rel=0.05
    )
    assert small_hours > fixed.tiers[0].worker_hours
    assert large_hours > fixed.tiers[1].worker_hours


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"unsure": 1.5}, "between 0 and 1"),
        ({"unsure": -0.1}, "between 0 and 1"),
        ({"size": 1.0}, "smallest model to the largest"),
        ({"size": 0.0}, "smallest model to the largest"),
        ({"name": LARGEST}, "names must be unique"),
        ({"name": ""}, "names must be unique"),
        ({"num_prefill": 0}, "prefill worker"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(wrong: dict[str, object], why: str) -> None:
    fields: dict[str, object] = {"name": "small", "size": 0.1, "unsure": 0.1} | wrong
    with pytest.raises(RequestError, match=why):
        SimConfig(smaller=(SmallTier(**fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"num_judged_tokens": 0}, {"max_shift": -1.0}, {"max_shift": 0.1}]
)
def test_a_judge_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        with_small(0.1, **wrong)
