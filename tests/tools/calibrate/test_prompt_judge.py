"""The prompt judge is the best of its kind, reads a prompt's end, and knows what it has seen."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.cascade import NUM_TOKENS_READ, features, log_odds
from disagg.tools.calibrate.calibration import PENALTY, fit_judge
from tests.grids import examples

PROMPTS = st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=30)


def loss(
    bias: float, weights: dict[int, float], prompts: list[list[int]], unsure: list[bool]
) -> float:
    total = PENALTY / 2 * sum(weight * weight for weight in weights.values())
    for prompt, is_unsure in zip(prompts, unsure, strict=True):
        odds = log_odds(bias, weights, prompt)
        total += math.log1p(math.exp(-odds if is_unsure else odds))
    return total


@examples(16)
@given(PROMPTS, st.randoms(use_true_random=False))
def test_it_has_learned_what_is_to_learn(prompts: list[list[int]], rng: random.Random) -> None:
    """No weight moved by a little makes it better, but for what 40 rounds leave over."""
    unsure = [rng.random() < 0.4 for _ in prompts]
    judge = fit_judge(prompts, unsure)
    weights = dict(judge.weights)
    assert judge.start_above is None
    found = loss(judge.bias, weights, prompts, unsure)
    blank = loss(math.log((sum(unsure) + 1) / (len(unsure) - sum(unsure) + 1)), {}, prompts, unsure)
    assert found <= blank + 1e-9
    for token in weights:
        for step in (-0.05, 0.05):
            moved = weights | {token: weights[token] + step}
            assert loss(judge.bias, moved, prompts, unsure) > found - 5e-4


def test_it_tells_prompts_apart() -> None:
    hard, easy = [1, 2, 7, 3], [1, 2, 8, 3]
    judge = fit_judge([hard, easy] * 30, [True, False] * 30)
    weights = dict(judge.weights)
    assert log_odds(judge.bias, weights, hard) > 1.5
    assert log_odds(judge.bias, weights, easy) < -1.5
    assert abs(log_odds(judge.bias, weights, [1, 2, 3])) < 1.0, "neither of them"
    assert log_odds(judge.bias, weights, [99]) == pytest.approx(judge.bias), "never seen"


def test_rare_tokens_have_no_weight() -> None:
    judge = fit_judge([[1, 50], [1, 51], [1, 52], [1]], [True, False, True, False])
    assert [token for token, _ in judge.weights] == [1]


def test_only_the_end_of_a_long_prompt_counts() -> None:
    long = [5] * 1000 + [6] * NUM_TOKENS_READ
    assert features(long) == {6: math.log1p(NUM_TOKENS_READ)}
    assert features([]) == {}


def test_prompts_of_one_kind_are_no_trouble() -> None:
    judge = fit_judge([[1, 2]] * 10, [True] * 10)
    assert 1.0 < log_odds(judge.bias, dict(judge.weights), [1, 2]) < 20.0
