"""The judge by its properties, thresholds under load, and what a decision says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.config import CascadeConfig, Signal
from disagg.messages import TokenLogprobs
from disagg.router.cascade import (
    Attempt,
    CascadeDecision,
    Verdict,
    judge,
    measure,
    moved_threshold,
    waits_as_fractions,
)
from tests.router.fakes import make_fleet, make_record, make_status

SIGNALS: tuple[Signal, ...] = ("minimum", "mean", "margin")
LOGPROBS = st.floats(-20.0, 0.0)


@st.composite
def scored(draw: st.DrawFn) -> TokenLogprobs:
    """A token with the two likeliest of its place, of which it may be one."""
    first, second = sorted((draw(LOGPROBS), draw(LOGPROBS)), reverse=True)
    chosen = draw(st.sampled_from((first, second, second - 1.0)))
    return TokenLogprobs(chosen, ((1, first), (2, second)))


ANSWERS = st.lists(scored(), min_size=1, max_size=12)
JUDGES = st.builds(
    CascadeConfig,
    signal=st.sampled_from(SIGNALS),
    num_judged_tokens=st.integers(1, 10),
)


def verdict_of(
    config: CascadeConfig, threshold: float, scores: list[TokenLogprobs], step: int = 1
) -> Verdict:
    """As it is found while the tokens come, so many at a time."""
    for num_tokens in range(step, len(scores) + step, step):
        is_end = num_tokens >= len(scores)
        verdict = judge(config, threshold, scores[:num_tokens], is_end)
        if verdict is not None:
            return verdict
    raise AssertionError("an answer that ended was not judged")


@given(JUDGES, LOGPROBS, ANSWERS, st.integers(1, 5))
def test_it_decides_in_time_and_as_the_whole_would(
    config: CascadeConfig, threshold: float, scores: list[TokenLogprobs], step: int
) -> None:
    verdict = verdict_of(config, threshold, scores, step)
    judged = scores[: config.num_judged_tokens]
    assert verdict.num_tokens <= config.num_judged_tokens
    assert verdict.is_sure == (measure(config.signal, judged) >= threshold)
    assert verdict.is_sure == (verdict.value >= threshold)
    if verdict.is_sure:
        assert verdict.num_tokens == len(judged), "released before all that counts was seen"


@given(JUDGES, LOGPROBS, ANSWERS)
def test_what_comes_after_the_judged_tokens_changes_nothing(
    config: CascadeConfig, threshold: float, scores: list[TokenLogprobs]
) -> None:
    judged = scores[: config.num_judged_tokens]
    assert verdict_of(config, threshold, scores) == verdict_of(config, threshold, judged)


@given(JUDGES, LOGPROBS, LOGPROBS, ANSWERS)
def test_who_is_sure_enough_is_so_at_every_lower_threshold(
    config: CascadeConfig, one: float, other: float, scores: list[TokenLogprobs]
) -> None:
    low, high = sorted((one, other))
    if verdict_of(config, high, scores).is_sure:
        assert verdict_of(config, low, scores).is_sure


@given(st.sampled_from(("minimum", "margin")), ANSWERS, scored())
def test_a_least_only_falls(
    signal: Signal, scores: list[TokenLogprobs], more: TokenLogprobs
) -> None:
    assert measure(signal, [*scores, more]) <= measure(signal, scores)


@given(ANSWERS)
def test_the_mean_lies_between(scores: list[TokenLogprobs]) -> None:
    mean = measure("mean", scores)
    highest = max(score.logprob for score in scores)
    assert measure("minimum", scores) - 1e-9 <= mean <= highest + 1e-9


def test_the_margin_is_to_the_likeliest_other_token() -> None:
    top = ((7, -0.1), (8, -3.0))
    assert measure("margin", [TokenLogprobs(-0.1, top)]) == pytest.approx(2.9)
    assert measure("margin", [TokenLogprobs(-3.0, top)]) == pytest.approx(-2.9)
    assert measure("margin", [TokenLogprobs(-5.0, top)]) == pytest.approx(-4.9)
    assert measure("margin", [TokenLogprobs(-0.7, ((7, -0.7), (8, -0.7)))]) == 0.0


@pytest.mark.parametrize("signal", SIGNALS)
def test_without_scores_nobody_is_sure(signal: Signal) -> None:
    config = CascadeConfig(signal=signal)
    assert judge(config, -100.0, [], is_end=False) is None
    assert judge(config, -100.0, [], is_end=True) == Verdict(False, -math.inf, 0)


def test_a_hopeless_answer_is_not_waited_for() -> None:
    scores = [TokenLogprobs(-0.01), TokenLogprobs(-2.0)]
    config = CascadeConfig(num_judged_tokens=8)
    assert judge(config, -1.0, scores[:1], is_end=False) is None
    assert judge(config, -1.0, scores, is_end=False) == Verdict(False, -2.0, 2)
    mean = CascadeConfig(signal="mean", num_judged_tokens=8)
    assert judge(mean, -1.0, scores, is_end=False) is None  # it may rise again


WAITS = st.floats(0.0, 5.0) | st.just(math.inf)


@given(LOGPROBS, st.floats(0.0, 3.0), WAITS, WAITS, WAITS)
def test_load_moves_the_threshold_within_its_bounds(
    threshold: float, max_shift: float, here: float, above: float, more: float
) -> None:
    moved = moved_threshold(threshold, max_shift, here, above)
    assert threshold - max_shift <= moved <= threshold + max_shift
    assert moved_threshold(threshold, max_shift, here, above + more) <= moved
    assert moved_threshold(threshold, max_shift, here + more, above) >= moved


def test_waits_are_read_from_the_fleet() -> None:
    small, large = (make_record(f"d-{name}", model=name) for name in ("small", "large"))
    fleet = make_fleet(small, large)
    slo_s = {"small": 10.0, "large": 10.0, "gone": 10.0}
    assert waits_as_fractions(fleet.view(), slo_s) == {"small": 0.0, "large": 0.0, "gone": math.inf}
    fleet.worker_stepped("d-large", (), make_status(num_waiting=4, num_uncomputed_tokens=10_000))
    waits = waits_as_fractions(fleet.view(), slo_s)
    assert waits["small"] == 0.0 and waits["large"] > 0.1  # 10,000 tokens at 0.1 ms, 10 s allowed
    fleet.worker_stepped("d-large", (), make_status(accepting=False))
    assert waits_as_fractions(fleet.view(), slo_s)["large"] == math.inf


def test_a_decision_says_who_answered_and_why() -> None:
    unsure = Attempt("small", "unsure", Verdict(False, -1.25, 3), -0.3)
    decision = CascadeDecision("minimum", (unsure, Attempt("large", "largest")))
    assert decision.model == "large"
    words = "small unsure (minimum -1.250 < -0.300 after 3), large largest"
    assert decision.in_words() == words
