"""What an ingress learns from the answers that passed through it, by model.

The time model says how long a step takes; two things it cannot say: how long answers get, and how
far off its predictions are where it matters. Values in, figures out; no clock.
"""

from __future__ import annotations

import math

# How long answers get, until some have been seen; and what one more answer weighs. A figure of this
# size ranks decode workers as the true length would, unless nearly all answers are far shorter.
USUAL_OUTPUT_TOKENS = 128
ANSWER_WEIGHT = 0.02

PERCENTILE = 0.98  # of first tokens come in time then: 0.95 would be missed half of the time
LEARNING_STEP = 0.1
USUAL_DELAY, MOST_DELAY = 4 / 3, 8.0


class OutputLengths:
    """The mean number of tokens of an answer, the latest ones counting most."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def usual(self, model: str) -> float:
        return self._means.get(model, USUAL_OUTPUT_TOKENS)

    def observe(self, model: str, num_tokens: int) -> None:
        before = self.usual(model)
        self._means[model] = before + ANSWER_WEIGHT * (num_tokens - before)


class Delays:
    """By what factor first tokens come later than predicted, but for the worst 2 %.

    A percentile by stochastic approximation (Robbins and Monro, 1951): up by 0.98 of a step for a
    value above it, down by 0.02 for one below. Without it requests taken in at the very limit of an
    SLO would miss it half of the time.
    """

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}

    def factor(self, model: str) -> float:
        return self._factors.get(model, USUAL_DELAY)

    def observe(self, model: str, predicted_s: float, seconds: float) -> None:
        """A first token for which one had to wait came after `seconds`."""
        factor = self.factor(model)
        rank = PERCENTILE if seconds > factor * predicted_s else PERCENTILE - 1.0
        factor *= math.exp(LEARNING_STEP * rank)
        self._factors[model] = min(max(1.0, factor), MOST_DELAY)
