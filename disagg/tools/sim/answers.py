"""Simulated answers and log-probabilities for cascades; no model runs.

An answer repeats the prompt's token. The confidence of a small model depends only on the seed, the
model and the request. One of the judged tokens, at a random position, has an exponentially
distributed log-probability, so that the configured share of answers is below the threshold. All
other tokens are certain. At that position the small model's token differs from the larger one's, so
a draft is accepted up to there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from disagg.config import CascadeConfig
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import SampledToken
from disagg.messages import TokenLogprobs

_CERTAIN = TokenLogprobs(0.0)


class SimulatedConfidence:
    """The simulated log-probabilities of each small model for each request.

    Args:
        unsure: for each model, the fraction of its answers that are below the threshold.
    """

    def __init__(self, config: CascadeConfig, unsure: Mapping[str, float], seed: int) -> None:
        self._num_judged_tokens = config.num_judged_tokens
        self._seed = seed
        self._mean = {
            model: _mean(threshold, share)
            for (model, share), threshold in zip(unsure.items(), config.thresholds, strict=True)
        }

    def least(self, model: str, sequence: Sequence) -> tuple[int, float]:
        """The index of the answer's token with the least log-probability; and that value."""
        rng = random.Random(f"{self._seed}/{model}/{sequence.tokens[0]}")
        num_judged = min(self._num_judged_tokens, sequence.sampling.max_tokens)
        return rng.randrange(num_judged), -self._mean[model] * rng.expovariate(1.0)

    def token(self, model: str, sequence: Sequence, num_ahead: int) -> SampledToken:
        """The token of `model`, with its score, after `num_ahead` more tokens of the sequence."""
        place, logprob = self.least(model, sequence)
        if sequence.num_output_tokens + num_ahead == place:
            return SampledToken(sequence.tokens[0] ^ 1, TokenLogprobs(logprob))
        return SampledToken(sequence.tokens[0], _CERTAIN)


def _mean(threshold: float, share: float) -> float:
    """The mean of an exponential distribution of which `share` is above -`threshold`."""
    if share in (0.0, 1.0):
        return math.inf if share else 0.0
    return threshold / math.log(share)
