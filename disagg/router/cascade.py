"""Small model first: judges the first tokens of an answer by their log-probabilities.

A model's log-probabilities separate its right answers from its wrong ones well, and cost nothing
extra. Pure functions; `ingress/escalation.py` runs the models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from disagg.config import CascadeConfig, Signal
from disagg.messages import TokenLogprobs
from disagg.router.costs import decode_cost, prefill_cost
from disagg.router.fleet import FleetView
from disagg.router.worker_view import WorkerView

# What each signal needs beside the chosen token's own log-probability.
NUM_TOP = {"minimum": 0, "mean": 0, "margin": 2}


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


class Verdict(msgspec.Struct, frozen=True):
    """The signal of an answer's first tokens beside the threshold."""

    is_sure: bool
    value: float
    num_tokens: int  # that it was measured on


def judge(
    config: CascadeConfig, threshold: float, scores: Sequence[TokenLogprobs], is_end: bool
) -> Verdict | None:
    """Whether an answer that begins with `scores` may stay; None: more tokens are needed.

    Decides on the first `num_judged_tokens`, on fewer where the answer ends before (`is_end`), and
    as soon as no further token can lift the signal to the threshold.
    """
    judged = scores[: config.num_judged_tokens]
    value = measure(config.signal, judged)
    is_sure = value >= threshold
    is_complete = is_end or len(judged) == config.num_judged_tokens
    is_lost = bool(judged) and not is_sure and config.signal != "mean"  # a least can only fall
    return Verdict(is_sure, value, len(judged)) if is_complete or is_lost else None


def moved_threshold(
    threshold: float, max_shift: float, wait_here: float, wait_above: float
) -> float:
    """The threshold under load: lower while the larger model is busier, so that fewer escalate.

    Args:
        wait_here, wait_above: predicted seconds of waiting for a new request on this tier and on
            the next, as fractions of the longest that each allows (its TTFT SLO).
    """
    pressure = min(1.0, max(0.0, wait_above)) - min(1.0, max(0.0, wait_here))
    return threshold - max_shift * pressure


def waits_as_fractions(fleet: FleetView, ttft_slo_s: Mapping[str, float]) -> dict[str, float]:
    """For each model, the least predicted wait for a first token and a place, over its SLO.

    Infinite where no worker takes requests.
    """
    workers: dict[str, list[WorkerView]] = {model: [] for model in ttft_slo_s}
    for worker in fleet.workers.values():
        if worker.accepting and worker.record.model in workers:
            workers[worker.record.model].append(worker)
    return {
        model: _least_wait_s(workers[model], fleet.answers.usual(model)) / slo_s
        for model, slo_s in ttft_slo_s.items()
    }


def _least_wait_s(workers: Sequence[WorkerView], usual_output_tokens: float) -> float:
    """Any worker can prefill; decode workers decode, unless there are none."""
    if not workers:
        return math.inf
    decodes = [each for each in workers if each.record.role == "decode"] or workers
    queue_s = min(prefill_cost(worker, 1, 0).queue_s for worker in workers)
    place_s = min(decode_cost(each, 1, 0, 1, usual_output_tokens).place_s for each in decodes)
    return max(queue_s, place_s)


class Attempt(msgspec.Struct, frozen=True):
    """The outcome of a request on one tier. `verdict` is None if nothing was judged there.

    `reason`: "sure", "unsure", "largest" (not judged), the code of the tier's error, or "kept" (an
    unsure answer that no larger tier could replace).
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
