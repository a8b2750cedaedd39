"""Learned per model from past answers: their usual length, and how late first tokens are.

Complements the time model, which predicts only seconds per step. Has no clock.
"""

from __future__ import annotations

import math

# The answer length that is assumed before any answer is known, and the weight of one more answer.
# It ranks decode workers as the true length would, unless nearly all answers are far shorter.
USUAL_OUTPUT_TOKENS = 128
ANSWER_WEIGHT = 0.02

PERCENTILE = 0.98  # of first tokens are in time; with 0.95 that goal itself is missed half the time
LEARNING_STEP = 0.1
USUAL_DELAY, MOST_DELAY = 4 / 3, 8.0
# Predictions below this share of the limit teach nothing: a few milliseconds of the network, or the
# other prompts of a step, double a short wait, but hardly change one that is near the limit.
LEAST_SHARE = 0.1


class OutputLengths:
    """Exponentially weighted mean of the tokens per answer."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def usual(self, model: str) -> float:
        return self._means.get(model, USUAL_OUTPUT_TOKENS)

    def observe(self, model: str, num_tokens: int) -> None:
        before = self.usual(model)
        self._means[model] = before + ANSWER_WEIGHT * (num_tokens - before)


class LatenessFactors:
    """The 98th percentile of measured over predicted TTFT, for requests that waited in a queue.

    Estimated by stochastic approximation (Robbins and Monro, 1951): up by 0.98 of a step for a
    value above it, down by 0.02 for one below. Without this factor, requests admitted at the limit
    of an SLO would miss it half of the time.
    """

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}

    def factor(self, model: str) -> float:
        return self._factors.get(model, USUAL_DELAY)

    def observe(self, model: str, predicted_s: float, seconds: float, limit_s: float) -> None:
        """Learn from a request that waited: its first token came after `seconds`, and would have
        been refused with a prediction above `limit_s`."""
        if predicted_s < LEAST_SHARE * limit_s:
            return
        factor = self.factor(model)
        rank = PERCENTILE if seconds > factor * predicted_s else PERCENTILE - 1.0
        factor *= math.exp(LEARNING_STEP * rank)
        self._factors[model] = min(max(1.0, factor), MOST_DELAY)
