"""Finds the highest request rate at which enough requests are within their SLOs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from disagg.tools.bench.result import Interval, share_interval

MAX_STEPS = 16
MAX_REPEATS = 3  # of a rate whose share is too near to the wanted one to tell


class Attained(NamedTuple):
    """How many requests were in time at a rate, of all that were sent."""

    rate: float
    num_in_time: int
    num_requests: int

    @property
    def share(self) -> float:
        return self.num_in_time / max(1, self.num_requests)

    @property
    def interval(self) -> Interval:
        return share_interval(self.num_in_time, self.num_requests)


class HighestRate(NamedTuple):
    """The highest rate that held, and the lowest that did not; None where there was none."""

    holds: Attained | None
    fails: Attained | None
    steps: tuple[Attained, ...]


def search(
    measure: Callable[[float], tuple[int, int]], start: float, share: float, precision: float
) -> HighestRate:
    """Double or halve the rate until it holds and the double does not, then bisect.

    A rate is measured again while its interval contains the wanted share, and its requests count
    together.

    Args:
        measure: sends requests at a rate; how many were in time, of how many.
        share: of requests that must be in time.
        precision: the search ends when the two rates differ by this share of the lower one.
    """
    steps: list[Attained] = []
    holds: Attained | None = None
    fails: Attained | None = None
    rate = start
    while len(steps) < MAX_STEPS:
        attained = _measured(measure, rate, share)
        steps.append(attained)
        if attained.share >= share:
            holds = attained
        else:
            fails = attained
        if holds is None:
            rate /= 2
        elif fails is None:
            rate *= 2
        elif fails.rate <= holds.rate * (1 + precision):
            break
        else:
            rate = (holds.rate * fails.rate) ** 0.5
    return HighestRate(holds, fails, tuple(steps))


def _measured(measure: Callable[[float], tuple[int, int]], rate: float, share: float) -> Attained:
    attained = Attained(rate, 0, 0)
    for _ in range(MAX_REPEATS):
        num_in_time, num = measure(rate)
        attained = Attained(rate, attained.num_in_time + num_in_time, attained.num_requests + num)
        low, high = attained.interval
        if not low <= share <= high:
            break
    return attained
