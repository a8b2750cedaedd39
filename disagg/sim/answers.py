"""Simulated answers and log-probabilities for cascades; no model runs.

An answer repeats the prompt's token. The confidence of a small model is drawn from the seed, the
model and the request only: one of the judged tokens, at a random position, has an exponentially
distributed log-probability, such that the configured share of answers is below the threshold; all
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
        unsure: by model, the fraction of its answers that are below the threshold.
    """

    def __init__(self, config: CascadeConfig, unsure: Mapping[str, float], seed: int) -> None:
        self._num_judged_tokens = config.num_judged_tokens
        self._seed = seed
        self._mean = {
            model: _mean(threshold, share)
            for (model, share), threshold in zip(unsure.items(), config.thresholds, strict=True)
        }

    def least(self, model: str, sequence: Sequence) -> tuple[int, float]:
        """Where in its answer `model` is least sure, and that token's log-probability."""
        rng = random.Random(f"{self._seed}/{model}/{sequence.tokens[0]}")
        num_judged = min(self._num_judged_tokens, sequence.sampling.max_tokens)
        return rng.randrange(num_judged), -self._mean[model] * rng.expovariate(1.0)

    def token(self, model: str, sequence: Sequence, num_ahead: int) -> SampledToken:
        """What `model` says, with its score, after `num_ahead` more tokens of the sequence."""
        place, logprob = self.least(model, sequence)
        if sequence.num_output_tokens + num_ahead == place:
            return SampledToken(sequence.tokens[0] ^ 1, TokenLogprobs(logprob))
        return SampledToken(sequence.tokens[0], _CERTAIN)


def _mean(threshold: float, share: float) -> float:
    """Of exponentially distributed numbers of which `share` are above -`threshold`."""
    if share in (0.0, 1.0):
        return math.inf if share else 0.0
    return threshold / math.log(share)
