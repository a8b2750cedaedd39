"""Calibrates a cascade: accuracy and cost of every threshold, from labelled prompts.

Two models answered the same prompts. Known are which answers are right, and the log-probabilities
of the small model's tokens. The measures are RouteLLM's (Ong et al., 2024): the gap is the large
model's accuracy minus the small one's, and recovered is the part of it that the cascade keeps.

A model's cost for an answer is its parameters times the tokens that went through it: the whole
prompt, as if none of it were cached, and every token of the answer but the last, which is not read
again. A small answer that is given up counts as far as it was judged.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from disagg.config import Signal
from disagg.errors import RequestError
from disagg.messages import TokenLogprobs
from disagg.router.cascade import measure

MAX_NUM_THRESHOLDS = 400


class Compared(msgspec.Struct, frozen=True):
    """One prompt that both models answered."""

    num_prompt_tokens: int
    scores: tuple[TokenLogprobs, ...]  # of the small answer's tokens
    num_large_tokens: int  # of the large answer
    small_is_right: bool
    large_is_right: bool


class Point(msgspec.Struct, frozen=True):
    """Accuracy and cost of one threshold, over all prompts."""

    threshold: float
    escalated: float  # share of the prompts
    accuracy: float
    recovered: float  # of the gap between the models
    cost: float  # as a fraction of the large model's alone


class Curve(msgspec.Struct, frozen=True):
    """All thresholds of one signal, the lowest (nothing escalates) first."""

    signal: Signal
    num_judged_tokens: int
    small_accuracy: float
    large_accuracy: float
    points: tuple[Point, ...]

    def cheapest(self, quality: float) -> Point:
        """The threshold of least cost that keeps this share of the large model's accuracy."""
        wanted = quality * self.large_accuracy
        good = [point for point in self.points if point.accuracy >= wanted]
        return min(good, key=lambda point: (point.cost, point.escalated))

    def at_recovered(self, share: float) -> Point:
        """The fewest escalations that recover `share` of the gap: RouteLLM's CPT."""
        good = [point for point in self.points if point.recovered >= share]
        return min(good, key=lambda point: (point.escalated, point.cost))

    @property
    def area(self) -> float:
        """Of the gap recovered over the share escalated, RouteLLM's APGR; by chance 0.5."""
        return math.fsum(
            (after.escalated - before.escalated) * (after.recovered + before.recovered) / 2
            for before, after in pairwise(self.points)
        )


def curve(
    answers: Sequence[Compared],
    signal: Signal,
    num_judged_tokens: int,
    small_parameters: int,
    large_parameters: int,
) -> Curve:
    """Raises `RequestError` where there is nothing to gain."""
    num_answers = len(answers)
    small_accuracy = sum(each.small_is_right for each in answers) / max(1, num_answers)
    large_accuracy = sum(each.large_is_right for each in answers) / max(1, num_answers)
    gap = large_accuracy - small_accuracy
    if gap <= 0.0:
        raise RequestError(
            f"There is no gap to recover: of {num_answers} prompts the small model answers"
            f" {small_accuracy:.1%} right and the large one {large_accuracy:.1%}. Take harder"
            " prompts, or serve the small model alone."
        )
    judged = [_Judged(each, signal, num_judged_tokens) for each in answers]
    large_cost = large_parameters * sum(each.num_large_positions for each in judged)
    points = []
    for threshold in _thresholds([each.values[-1] for each in judged]):
        num_right = num_escalated = cost = 0
        for each in judged:
            num_small, is_sure = each.at(threshold)
            cost += small_parameters * num_small
            if is_sure:
                num_right += each.answer.small_is_right
            else:
                num_right += each.answer.large_is_right
                num_escalated += 1
                cost += large_parameters * each.num_large_positions
        accuracy = num_right / num_answers
        points.append(
            Point(
                threshold,
                num_escalated / num_answers,
                accuracy,
                (accuracy - small_accuracy) / gap,
                cost / large_cost,
            )
        )
    return Curve(signal, num_judged_tokens, small_accuracy, large_accuracy, tuple(points))


class _Judged:
    """A small answer with its signal after each token that is judged."""

    def __init__(self, answer: Compared, signal: Signal, num_judged_tokens: int) -> None:
        scores = answer.scores[:num_judged_tokens]
        self.answer = answer
        self.values = [measure(signal, scores[: end + 1]) for end in range(len(scores))]
        self.values = self.values or [-math.inf]
        self._may_rise = signal == "mean"
        self.num_large_positions = answer.num_prompt_tokens + answer.num_large_tokens - 1

    def at(self, threshold: float) -> tuple[int, bool]:
        """How many tokens the small model computes, and whether its answer is kept."""
        before = self.answer.num_prompt_tokens - 1
        if self.values[-1] >= threshold:
            return before + len(self.answer.scores), True
        if self._may_rise:
            return before + len(self.values), False
        # They fall: the first below the threshold ends it.
        first = bisect_right(self.values, -threshold, key=lambda value: -value)
        return before + first + 1, False


def _thresholds(values: Sequence[float]) -> list[float]:
    """One threshold between any two signals, one below all and one above all. If there are very
    many, an evenly spaced part of them."""
    ordered = sorted({value for value in values if math.isfinite(value)}) or [0.0]
    between = [(low + high) / 2 for low, high in pairwise(ordered)]
    step = max(1, len(between) // MAX_NUM_THRESHOLDS)
    return [ordered[0] - 1.0, *between[::step], ordered[-1] + 1.0]
