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
    first_verdict,
    judge,
    lead,
    measure,
)

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
    config: CascadeConfig,
    threshold: float,
    scores: list[TokenLogprobs],
    step: int = 1,
    needed_lead: float = math.inf,
) -> Verdict:
    """As it is found while the tokens come, so many at a time."""
    for num_tokens in range(step, len(scores) + step, step):
        some = scores[:num_tokens]
        is_end = num_tokens >= len(scores)
        verdict = first_verdict(config, threshold, some, num_tokens - step, is_end, needed_lead)
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


LEADS = st.floats(0.0, 20.0) | st.just(math.inf)


@given(JUDGES, LOGPROBS, ANSWERS, st.integers(1, 5), LEADS)
def test_a_lead_changes_nothing_but_to_release_sooner(
    config: CascadeConfig,
    threshold: float,
    scores: list[TokenLogprobs],
    step: int,
    needed_lead: float,
) -> None:
    whole = verdict_of(config, threshold, scores, step)
    verdict = verdict_of(config, threshold, scores, step, needed_lead)
    assert verdict == verdict_of(config, threshold, scores, 1, needed_lead), "as if one by one"
    assert verdict.num_tokens <= whole.num_tokens
    if verdict == whole:
        return
    assert verdict.is_sure and verdict.value >= threshold
    its_lead = lead(config.signal, verdict.value, threshold)
    assert verdict.num_tokens * its_lead >= needed_lead, "released without the lead"


@given(JUDGES, LOGPROBS, ANSWERS, LEADS, LEADS)
def test_a_greater_lead_is_nearer_to_the_whole_judgement(
    config: CascadeConfig, threshold: float, scores: list[TokenLogprobs], one: float, other: float
) -> None:
    less, more = sorted((one, other))
    sooner = verdict_of(config, threshold, scores, needed_lead=less)
    later = verdict_of(config, threshold, scores, needed_lead=more)
    assert sooner.num_tokens <= later.num_tokens
    assert sooner.is_sure or not later.is_sure


def test_the_needed_lead_falls_with_the_tokens() -> None:
    """-0.001 has log-odds of 6.9 and -0.1 of 2.25: a lead of 4.65."""
    scores = [TokenLogprobs(-0.001)] * 3
    config = CascadeConfig(num_judged_tokens=8)
    assert lead("minimum", -0.001, -0.1) == pytest.approx(4.655, abs=0.001)
    for needed_lead, num_tokens in ((4.6, 1), (4.7, 2), (9.3, 2), (9.4, 3)):
        verdict = verdict_of(config, -0.1, [*scores, TokenLogprobs(-2.0)], needed_lead=needed_lead)
        assert verdict == Verdict(True, -0.001, num_tokens)
    assert not verdict_of(config, -0.1, [*scores, TokenLogprobs(-2.0)], needed_lead=14.0).is_sure


@given(st.sampled_from(SIGNALS), LOGPROBS, LOGPROBS, LOGPROBS)
def test_a_lead_grows_with_the_signal_and_is_none_at_the_threshold(
    signal: Signal, threshold: float, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert lead(signal, low, threshold) <= lead(signal, high, threshold)
    if threshold < 0.0:
        assert lead(signal, threshold, threshold) == 0.0
    assert (lead(signal, one, threshold) >= 0.0) == (one >= threshold)


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


def test_a_decision_says_who_answered_and_why() -> None:
    unsure = Attempt("small", "unsure", Verdict(False, -1.25, 3), -0.3)
    decision = CascadeDecision("minimum", (unsure, Attempt("large", "largest")))
    assert decision.model == "large"
    words = "small unsure (minimum -1.250 < -0.300 after 3), large largest"
    assert decision.in_words() == words
