"""Every point of a curve is what the judge itself would have done, and costs are counted so."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.config import CascadeConfig, Signal
from disagg.errors import RequestError
from disagg.messages import TokenLogprobs
from disagg.router.cascade import judge
from disagg.tools.calibrate.calibration import (
    CONFIDENCE,
    Compared,
    Curve,
    ModelSizes,
    certify_lead,
    make_judge,
    min_num_prompts,
    replay,
    upper_bound,
)

SIZES = SMALL, LARGE = ModelSizes(10, 100)
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


def with_a_better_large_model(answers: list[Compared]) -> list[Compared]:
    """Add answers until the large model is right more often, which a curve needs."""
    lead = sum(each.large_is_right - each.small_is_right for each in answers)
    won = replace(answers[0], small_is_right=False, large_is_right=True)
    return [*answers, *[won] * (1 - min(lead, 1))]


def judged_one_by_one(
    answer: Compared, config: CascadeConfig, threshold: float, needed_lead: float = math.inf
) -> tuple[int, bool]:
    """After how many tokens the small answer is judged, and whether it stays."""
    for num_tokens in range(1, len(answer.scores) + 1):
        is_end = num_tokens == len(answer.scores)
        verdict = judge(config, threshold, answer.scores[:num_tokens], is_end, needed_lead)
        if verdict is not None:
            return num_tokens, verdict.is_sure
    raise AssertionError


@given(ANSWERS, st.sampled_from(SIGNALS), st.integers(1, 6))
def test_each_point_is_what_the_judge_does(
    answers: list[Compared], signal: Signal, num_judged: int
) -> None:
    answers = with_a_better_large_model(answers)
    config = CascadeConfig(signal=signal, num_judged_tokens=num_judged)
    found = Curve(answers, signal, num_judged, SIZES)
    alone = sum(LARGE * (each.num_prompt_tokens + each.num_large_tokens - 1) for each in answers)
    for point in found.points:
        cost = right = escalated = 0
        for each in answers:
            num_judged_here, is_sure = judged_one_by_one(each, config, point.threshold)
            num_small = len(each.scores) if is_sure else num_judged_here
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
    answers = with_a_better_large_model(answers)
    found = Curve(answers, signal, num_judged, SIZES)
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
    found = Curve(easy_and_hard(50), "minimum", 4, SIZES)
    assert found.cheapest(1.0).threshold == pytest.approx(-1.05)
    assert found.cheapest(1.0).escalated == 0.5
    assert found.at_recovered(0.95).escalated == 0.5
    assert found.area == pytest.approx(0.75)
    assert found.cheapest(0.5).escalated == 0.0
    small_cost, large_cost = 100 * 5 * SMALL, 100 * 7 * LARGE  # tokens of all prompts
    assert found.cheapest(1.0).cost == pytest.approx(small_cost / large_cost + 0.5)


def test_a_judge_that_knows_nothing_has_half_the_area() -> None:
    answers = easy_and_hard(50, hard_logprob=-0.1)
    found = Curve(answers, "minimum", 4, SIZES)
    assert [point.escalated for point in found.points] == [0.0, 1.0]
    assert found.area == pytest.approx(0.5)


def test_very_many_prompts_do_not_make_very_many_points() -> None:
    answers = [Compared(1, scores_of([-i / 7]), 1, i % 2 == 0, True) for i in range(3000)]
    found = Curve(answers, "minimum", 4, SIZES)
    assert len(found.points) < 1000
    assert all(math.isfinite(p.threshold) for p in found.points)


@pytest.mark.parametrize("large_is_right", [True, False])
def test_without_a_gap_there_is_nothing_to_calibrate(large_is_right: bool) -> None:
    answers = [Compared(5, scores_of([-0.1]), 3, True, large_is_right)] * 4
    with pytest.raises(RequestError, match=r"no gap.* of 4 prompts .* 100.0% right"):
        Curve(answers, "minimum", 4, SIZES)


THRESHOLDS = st.floats(-4.0, -0.01)


@given(ANSWERS, st.sampled_from(SIGNALS), st.integers(1, 6), THRESHOLDS, st.floats(0.0, 10.0))
def test_a_lead_plays_as_the_judge_does(
    answers: list[Compared],
    signal: Signal,
    num_judged: int,
    threshold: float,
    needed_lead: float,
) -> None:
    config = CascadeConfig(
        signal=signal, num_judged_tokens=num_judged, thresholds=(threshold,), leads=(needed_lead,)
    )
    outcome = replay(answers, config, SIZES)
    judged = [judged_one_by_one(each, config, threshold, needed_lead) for each in answers]
    assert outcome.num_held == pytest.approx(sum(held for held, _ in judged) / len(answers))
    assert outcome.escalated == pytest.approx(sum(not sure for _, sure in judged) / len(answers))
    right = sum(
        each.small_is_right if is_sure else each.large_is_right
        for each, (_, is_sure) in zip(answers, judged, strict=True)
    )
    assert outcome.accuracy == pytest.approx(right / len(answers))


def num_lost(answers: list[Compared], config: CascadeConfig, needed_lead: float) -> int:
    """Right answers that are lost because of the lead, by the judge itself."""
    (threshold,) = config.thresholds
    return sum(
        each.large_is_right
        and not each.small_is_right
        and judged_one_by_one(each, config, threshold, needed_lead)[1]
        and not judged_one_by_one(each, config, threshold)[1]
        for each in answers
    )


@given(ANSWERS, st.sampled_from(SIGNALS), st.integers(2, 6), THRESHOLDS, st.floats(0.15, 0.9))
def test_the_lead_is_the_least_whose_bound_is_within_the_risk(
    answers: list[Compared], signal: Signal, num_judged: int, threshold: float, risk: float
) -> None:
    config = CascadeConfig(signal=signal, num_judged_tokens=num_judged, thresholds=(threshold,))
    found = certify_lead(answers, config, risk)

    def bound(needed_lead: float) -> float:
        return upper_bound(num_lost(answers, config, needed_lead), len(answers))

    if found == math.inf:
        assert bound(math.inf) > risk or bound(1e6) > risk
        return
    for needed_lead in (found, found + 0.5, found + 5.0):
        assert bound(needed_lead) <= risk
    assert found == 0.0 or bound(found - 0.002) > risk


@pytest.mark.parametrize("number", [0, 1, 7, 40])
def test_the_bound_of_a_share_is_clopper_and_pearsons(number: int) -> None:
    of = 50
    share = upper_bound(number, of)
    seen = sum(math.comb(of, i) * share**i * (1 - share) ** (of - i) for i in range(number + 1))
    assert seen == pytest.approx(1.0 - CONFIDENCE, abs=1e-6)
    assert upper_bound(of, of) == 1.0


@pytest.mark.parametrize("risk", [0.5, 0.1, 0.005])
def test_so_many_prompts_are_the_fewest_that_certify_a_risk(risk: float) -> None:
    least = min_num_prompts(risk)
    assert upper_bound(0, least) <= risk < upper_bound(0, least - 1)
    answers = [Compared(5, scores_of([-0.001] * 3), 3, True, True)] * least
    config = CascadeConfig(thresholds=(-0.1,))
    assert certify_lead(answers, config, risk) == 0.0
    assert certify_lead(answers[1:], config, risk) == math.inf


def drawn(rng: random.Random) -> Compared:
    """The surer the first token, the rarer is a doubtful one later, where the model is wrong."""
    first = 10.0 ** rng.uniform(-6.0, -1.0)
    is_wrong = rng.random() < 10.0 * first
    later = -2.0 if is_wrong else -first / 2
    return Compared(5, scores_of([-first, later]), 3, not is_wrong, True)


def test_the_risk_holds_in_new_prompts_as_often_as_is_said() -> None:
    rng = random.Random(7)
    config = CascadeConfig(thresholds=(-0.1,))
    fresh = [drawn(rng) for _ in range(10_000)]
    risk, num_kept, num_trials = 0.02, 0, 60
    for _ in range(num_trials):
        found = certify_lead([drawn(rng) for _ in range(300)], config, risk)
        assert 0.0 < found < math.inf
        num_kept += num_lost(fresh, config, found) <= risk * len(fresh)
    assert num_kept >= CONFIDENCE * num_trials


def told_apart(num_each: int) -> list[Compared]:
    """Half of the prompts have the token 7, and the small model is unsure and wrong; of the others
    a fifth is released too early."""
    easy = Compared(5, scores_of([-0.001] * 4), 5, True, True, (1, 2, 3, 5))
    slip = Compared(5, scores_of([-0.01, -0.01, -0.5, -0.01]), 5, True, True, (1, 2, 3, 6))
    hard = Compared(5, scores_of([-2.0] * 4), 5, False, True, (1, 2, 3, 7))
    return [hard, easy, hard, easy, hard, easy, hard, easy, hard, slip] * num_each


def test_the_judge_starts_what_is_hopeless_on_the_large_model_and_costs_no_more() -> None:
    answers = told_apart(20)
    slow = CascadeConfig(thresholds=(-0.1,))
    quick = CascadeConfig(thresholds=(-0.1,), leads=(0.0,))
    judge = make_judge(answers, quick, SIZES)
    assert judge is not None
    config = CascadeConfig(thresholds=(-0.1,), leads=(0.0,), prompt_judges=(judge,))
    outcome, before = replay(answers, config, SIZES), replay(answers, slow, SIZES)
    assert outcome.started == pytest.approx(0.5)
    assert outcome.escalated == 0.0
    assert outcome.cost <= before.cost
    assert outcome.num_held == 1.0 < before.num_held


def test_a_judge_that_cannot_tell_starts_none() -> None:
    answers = [replace(each, prompt_token_ids=(1, 2)) for each in told_apart(20)]
    quick = CascadeConfig(thresholds=(-0.1,), leads=(0.0,))
    judge = make_judge(answers, quick, SIZES)
    if judge is not None:
        config = CascadeConfig(thresholds=(-0.1,), prompt_judges=(judge,))
        assert replay(answers, config, SIZES).started == 0.0
