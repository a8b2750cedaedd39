"""Judges a prompt before any model runs: how likely a small model will be unsure of its answer.

A logistic regression on the tokens at the prompt's end, fitted by `disagg cascade calibrate` on
prompts that the small model has answered. It looks at the prompt alone, like RouteLLM's routers
(Ong et al., 2024, arXiv:2406.18665), but runs no model, so a request that starts on the larger
model has not waited.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from disagg.config import PromptJudge

NUM_TOKENS_READ = 256  # at the prompt's end; so a long prompt costs as little as a short one
MIN_NUM_PROMPTS = 3  # with a token, for a weight of its own
PENALTY = 1.0  # of squared weights, as if of a normal prior with variance 1
NUM_SWEEPS = 40


def features(token_ids: Sequence[int]) -> dict[int, float]:
    """For each token at the prompt's end, the logarithm of one plus its number of occurrences."""
    counts = Counter(token_ids[-NUM_TOKENS_READ:])
    return {token: math.log1p(count) for token, count in counts.items()}


def log_odds(bias: float, weights: Mapping[int, float], token_ids: Sequence[int]) -> float:
    """The log-odds that the model is unsure, as a fitted judge predicts; 0 is a chance of 0.5."""
    found = features(token_ids)
    return bias + math.fsum(weights.get(token, 0.0) * value for token, value in found.items())


def is_poor(judge: PromptJudge, weights: Mapping[int, float], token_ids: Sequence[int]) -> bool:
    """Whether a prompt starts on the next tier. `weights`: the judge's, by token."""
    if judge.start_above is None:
        return False
    return log_odds(judge.bias, weights, token_ids) > judge.start_above


def fit(prompts: Sequence[Sequence[int]], unsure: Sequence[bool]) -> PromptJudge:
    """The judge with the least penalised loss. Its threshold does not start any prompt on the
    larger model yet.

    Coordinate descent: each weight in turn takes a Newton step with the largest curvature that the
    logistic loss can have, so the loss falls at every step.

    Args:
        prompts: token ids; `unsure`: for each, whether the small model was unsure.
    """
    found = [features(prompt) for prompt in prompts]
    column: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row, values in enumerate(found):
        for token, value in values.items():
            column[token].append((row, value))
    columns = {token: its for token, its in column.items() if len(its) >= MIN_NUM_PROMPTS}
    weights = dict.fromkeys(columns, 0.0)
    curvature = {
        token: PENALTY + sum(value * value for _, value in its) / 4
        for token, its in columns.items()
    }
    share = (sum(unsure) + 1) / (len(unsure) + 2)
    bias = math.log(share / (1.0 - share))
    odds = [bias] * len(prompts)
    for _ in range(NUM_SWEEPS):
        step = 4 * sum(map(_error, odds, unsure)) / max(1, len(odds))
        bias -= step
        odds = [each - step for each in odds]
        for token, its in columns.items():
            slope = PENALTY * weights[token]
            slope += sum(value * _error(odds[row], unsure[row]) for row, value in its)
            step = slope / curvature[token]
            weights[token] -= step
            for row, value in its:
                odds[row] -= step * value
    return PromptJudge(bias, tuple(sorted(weights.items())))


def _error(odds: float, is_unsure: bool) -> float:
    """Predicted chance minus the truth: the slope of the logistic loss."""
    chance = 1.0 / (1.0 + math.exp(-odds)) if odds > -700.0 else 0.0
    return chance - is_unsure
