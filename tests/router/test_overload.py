"""Three times what a fleet can do: who is taken in is served in time, the rest is told to wait.

Real engines, schedulers and routing in virtual time (see `overloaded_fleet`), with time models that
learn while they are used.
"""

from __future__ import annotations

import pytest

from tests.router.overloaded_fleet import Outcome, OverloadedFleet, Traffic

SLO_S = 2.0
SECONDS = 45.0
# So much that less than a half can be served, and about a third where only one resource is short.
PROMPTS = [Traffic(75.0, 800, 5)]  # short of computing
ANSWERS = [Traffic(45.0, 50, 200)]  # short of places in the batch
LONG_ANSWERS = [Traffic(12.0, 600, 500)]  # short of blocks: sequences outgrow the cache
ALL = [Traffic(30.0, 700, 20), Traffic(10.0, 60, 300), Traffic(2.0, 3000, 60)]
KINDS = {"prompts": PROMPTS, "answers": ANSWERS, "long_answers": LONG_ANSWERS, "all": ALL}


def play(traffic: list[Traffic], slo_s: float = SLO_S, factor: float = 1.0) -> Outcome:
    fleet = OverloadedFleet(num_workers=2, max_num_seqs=32, slo_s=slo_s, seed=1)
    kinds = [Traffic(k.per_s * factor, k.num_prompt_tokens, k.num_output_tokens) for k in traffic]
    return fleet.play(kinds, SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_requests_keep_their_slo_and_the_surplus_is_refused(kind: str) -> None:
    outcome = play(KINDS[kind])
    assert outcome.wait_s(0.95) <= SLO_S
    assert 0.5 < outcome.share_refused < 0.9
    assert all(0.0 < each.retry_after_s < 60.0 for each in outcome.refused)


def test_nobody_is_refused_by_a_fleet_that_has_time() -> None:
    outcome = play(ALL, factor=0.15)
    assert outcome.refused == []
    assert outcome.wait_s(0.95) < SLO_S


def test_refusing_costs_no_throughput() -> None:
    """What is served under overload is what the same fleet serves when it lets all wait."""
    served = {}
    for slo_s in (SLO_S, 1e6):
        fleet = OverloadedFleet(num_workers=2, max_num_seqs=32, slo_s=slo_s, seed=1)
        fleet.play([Traffic(20.0, 50, 200)], SECONDS)
        served[slo_s] = fleet.outcome.num_tokens / fleet.now
    assert served[SLO_S] > 0.85 * served[1e6]


def test_without_admission_the_same_load_waits_for_ever() -> None:
    """The negative control."""
    assert play(PROMPTS, slo_s=1e6, factor=0.5).wait_s(0.95) > 5 * SLO_S
