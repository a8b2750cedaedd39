"""Small model first: judges the first tokens of an answer, and a prompt before any model runs.

A model's log-probabilities separate its right answers from its wrong ones well, and cost nothing
extra. How likely a small model will be unsure of its answer to a prompt is judged by a logistic
regression on the tokens at the prompt's end, fitted by `disagg cascade calibrate` on prompts that
the small model has answered. It looks at the prompt alone, like RouteLLM's routers (Ong et al.,
2024, arXiv:2406.18665), but runs no model, so a request that starts on the larger model has not
waited.

Pure functions; `ingress/escalation.py` runs the models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from disagg.config import CascadeConfig, PromptJudge, Signal
from disagg.messages import TokenLogprobs

# What each signal needs beside the chosen token's own log-probability.
NUM_TOP = {"minimum": 0, "mean": 0, "margin": 2}

NUM_TOKENS_READ = 256  # at the prompt's end; so a long prompt costs as little as a short one


def measure(signal: Signal, scores: Sequence[TokenLogprobs]) -> float:
    """The confidence signal of some tokens, in nats; higher is surer. -inf for no tokens.

    "minimum": the smallest log-probability. "mean": the mean log-probability. "margin": the
    smallest difference between a token and the likeliest other token; negative if that one was
    likelier.
    """
    if not scores:
        return -math.inf
    if signal == "mean":
        return math.fsum(score.logprob for score in scores) / len(scores)
    if signal == "minimum":
        return min(score.logprob for score in scores)
    return min(map(_margin, scores))


def _margin(score: TokenLogprobs) -> float:
    """`top` does not say which of its entries was chosen: it is the first of equal probability."""
    others = [logprob for _, logprob in score.top]
    if score.logprob in others:
        others.remove(score.logprob)
    return score.logprob - max(others) if others else math.inf


def lead(signal: Signal, value: float, threshold: float) -> float:
    """By how much a signal is above a threshold, in nats of log-odds; negative: below it.

    Near certainty a log-probability hardly moves: -0.001 is a hundred times surer than -0.1. As
    log-odds the two are as far apart as such margins, which are differences of log-odds already.
    """
    if signal == "margin" or value < threshold:
        return value - threshold
    return math.inf if value >= 0.0 else _log_odds(value) - _log_odds(threshold)


def lead_to_release(config: CascadeConfig, tier: int) -> float:
    """The lead times tokens with which an answer of a tier is released early; inf: none is."""
    return config.leads[tier] if config.leads else math.inf


def _log_odds(logprob: float) -> float:
    """Convert a log-probability below 0 to log-odds."""
    return logprob - math.log(-math.expm1(logprob))


class Verdict(msgspec.Struct, frozen=True):
    """The signal of an answer's first tokens beside the threshold."""

    is_sure: bool
    value: float
    num_tokens: int  # that it was measured on


def judge(
    config: CascadeConfig,
    threshold: float,
    scores: Sequence[TokenLogprobs],
    is_end: bool,
    needed_lead: float = math.inf,
) -> Verdict | None:
    """Whether an answer that begins with `scores` may stay; None: more tokens are needed.

    Decides on the first `num_judged_tokens`, on fewer where the answer ends before (`is_end`), as
    soon as no further token can lift the signal to the threshold, and as soon as the signal of k
    tokens leads the threshold by `needed_lead` / k: a sequential test, with a bound that falls as
    evidence comes in. Only the last may decide otherwise than all judged tokens would; how often
    is what `calibration.certify_lead` bounds.
    """
    judged = scores[: config.num_judged_tokens]
    value = measure(config.signal, judged)
    is_sure = value >= threshold
    is_complete = is_end or len(judged) == config.num_judged_tokens
    is_lost = bool(judged) and not is_sure and config.signal != "mean"  # a least can only fall
    is_early = (
        is_sure
        and needed_lead != math.inf
        and len(judged) * lead(config.signal, value, threshold) >= needed_lead
    )
    if is_complete or is_lost or is_early:
        return Verdict(is_sure, value, len(judged))
    return None


def first_verdict(
    config: CascadeConfig,
    threshold: float,
    scores: Sequence[TokenLogprobs],
    num_seen: int,
    is_end: bool,
    needed_lead: float = math.inf,
) -> Verdict | None:
    """The verdict as if tokens came one by one; `num_seen` of them were judged before.

    So the decision on an answer does not depend on how many tokens came at once.
    """
    for number in range(min(num_seen + 1, len(scores)), len(scores) + 1):
        its_end = is_end and number == len(scores)
        verdict = judge(config, threshold, scores[:number], its_end, needed_lead)
        if verdict is not None:
            return verdict
    return None


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


class Attempt(msgspec.Struct, frozen=True):
    """The outcome of a request on one tier. `verdict` is None if nothing was judged there.

    `reason`: "sure", "unsure", "largest" (not judged), "poor" (passed over, because it would
    probably be unsure of this prompt), the code of the tier's error, or "kept" (an unsure answer,
    or one of a tier that was passed over, because no larger tier could answer).
    """

    model: str
    reason: str
    verdict: Verdict | None = None
    threshold: float | None = None


class CascadeDecision(msgspec.Struct, frozen=True):
    """Which tier answered a request and why: for traces, headers and `GET /debug/requests/{id}`."""

    signal: Signal
    attempts: tuple[Attempt, ...]  # in order; the last one's model answers

    @property
    def model(self) -> str:
        return self.attempts[-1].model

    def in_words(self) -> str:
        """One line, ASCII but for models' names: `small unsure (minimum -1.20 < -0.30 after 3)`."""
        return ", ".join(self._words(each) for each in self.attempts)

    def _words(self, attempt: Attempt) -> str:
        words = f"{attempt.model} {attempt.reason}"
        if attempt.verdict is None or attempt.threshold is None:
            return words
        relation = ">=" if attempt.verdict.is_sure else "<"
        return (
            f"{words} ({self.signal} {attempt.verdict.value:.3f} {relation}"
            f" {attempt.threshold:.3f} after {attempt.verdict.num_tokens})"
        )
