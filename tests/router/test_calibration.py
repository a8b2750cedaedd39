"""Every point of a curve is what the judge itself would have done, and costs are counted so."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from disagg.config import CascadeConfig, Signal
from disagg.errors import RequestError
from disagg.messages import TokenLogprobs
from disagg.router.calibration import Compared, Curve, curve
from disagg.router.cascade import judge

SMALL, LARGE = 10, 100  # parameters
SIGNALS: tuple[Signal, ...] = ("minimum", "mean", "margin")


def scores_of(logprobs: list[float]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(each, ((0, each), (0, each - 1.0))) for each in logprobs)


ANSWERS = st.lists(
    st.builds(
        Compared,
        num_prompt_tokens=st.integers(1, 50),
        scores=st.lists(st.floats(-5.0, 0.0), min_size=1, max_size=8).map(scores_of),
        num_large_tokens=st.integers(1, 20),
        small_is_right=st.booleans(),
        large_is_right=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def played(answer: Compared, config: CascadeConfig, threshold: float) -> tuple[int, bool]:
    """Tokens of the small answer until it is judged, and whether it stays."""
    for num_tokens in range(1, len(answer.scores) + 1):
        is_end = num_tokens == len(answer.scores)
        verdict = judge(config, threshold, answer.scores[:num_tokens], is_end)
        if verdict is not None:
            return (len(answer.scores) if verdict.is_sure else num_tokens), verdict.is_sure
    raise AssertionError


@given(ANSWERS, st.sampled_from(SIGNALS), st.integers(1, 6))
def test_each_point_is_what_the_judge_does(
    answers: list[Compared], signal: Signal, num_judged: int
) -> None:
    assume(sum(each.large_is_right - each.small_is_right for each in answers) > 0)
    config = CascadeConfig(signal=signal, num_judged_tokens=num_judged)
    found = curve(answers, signal, num_judged, SMALL, LARGE)
    alone = sum(LARGE * (each.num_prompt_tokens + each.num_large_tokens - 1) for each in answers)
    for point in found.points:
        cost = right = escalated = 0
        for each in answers:
            num_small, is_sure = played(each, config, point.threshold)
            cost += SMALL * (each.num_prompt_tokens + num_small - 1)
            if not is_sure:
                cost += LARGE * (each.num_prompt_tokens + each.num_large_tokens - 1)
            right += each.small_is_right if is_sure else each.large_is_right
            escalated += not is_sure
        assert point.cost == pytest.approx(cost / alone)
        assert point.accuracy == pytest.approx(right / len(answers))
        assert point.escalated == pytest.approx(escalated / len(answers))


@given(ANSWERS, st.sampled_from(SIGNALS), st.integers(1, 6), st.floats(0.01, 1.0))
def test_a_curve_goes_from_the_small_model_to_the_large_one(
    answers: list[Compared], signal: Signal, num_judged: int, quality: float
) -> None:
    assume(sum(each.large_is_right - each.small_is_right for each in answers) > 0)
    found = curve(answers, signal, num_judged, SMALL, LARGE)
    first, last = found.points[0], found.points[-1]
    assert (first.escalated, first.recovered) == (0.0, 0.0)
    assert (last.escalated, last.recovered) == (1.0, 1.0)
    shares = [point.escalated for point in found.points]
    assert shares == sorted(shares)
    chosen = found.cheapest(quality)
    assert chosen.accuracy >= quality * found.large_accuracy
    better = [p for p in found.points if p.accuracy >= quality * found.large_accuracy]
    assert all(chosen.cost <= point.cost for point in better)


def easy_and_hard(num_each: int, hard_logprob: float = -2.0) -> list[Compared]:
    """The small model is right where it is sure; half of the prompts are so."""
    easy = [Compared(5, scores_of([-0.1]), 3, True, True) for _ in range(num_each)]
    hard = [Compared(5, scores_of([hard_logprob]), 3, False, True) for _ in range(num_each)]
    return easy + hard


def test_measures_of_a_perfect_judge() -> None:
    """Half escalate and all is recovered: an area of three quarters, the most there is."""
    found = curve(easy_and_hard(50), "minimum", 4, SMALL, LARGE)
    assert found.cheapest(1.0).threshold == pytest.approx(-1.05)
    assert found.cheapest(1.0).escalated == 0.5
    assert found.at_recovered(0.95).escalated == 0.5
    assert found.area == pytest.approx(0.75)
    assert found.cheapest(0.5).escalated == 0.0
    small_cost, large_cost = 100 * 5 * SMALL, 100 * 7 * LARGE  # tokens of all prompts
    assert found.cheapest(1.0).cost == pytest.approx(small_cost / large_cost + 0.5)


def test_a_judge_that_knows_nothing_has_half_the_area() -> None:
    answers = easy_and_hard(50, hard_logprob=-0.1)
    found = curve(answers, "minimum", 4, SMALL, LARGE)
    assert [point.escalated for point in found.points] == [0.0, 1.0]
    assert found.area == pytest.approx(0.5)


def test_very_many_prompts_do_not_make_very_many_points() -> None:
    answers = [Compared(1, scores_of([-i / 7]), 1, i % 2 == 0, True) for i in range(3000)]
    found = curve(answers, "minimum", 4, SMALL, LARGE)
    assert len(found.points) < 1000
    assert isinstance(found, Curve) and all(math.isfinite(p.threshold) for p in found.points)


@pytest.mark.parametrize("large_is_right", [True, False])
def test_without_a_gap_there_is_nothing_to_calibrate(large_is_right: bool) -> None:
    answers = [Compared(5, scores_of([-0.1]), 3, True, large_is_right)] * 4
    with pytest.raises(RequestError, match=r"no gap.* of 4 prompts .* 100.0% right"):
        curve(answers, "minimum", 4, SMALL, LARGE)
