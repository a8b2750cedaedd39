"""Few of many parameters: `make test-bench` has all."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hypothesis import settings

Value = TypeVar("Value")
IS_WHOLE = "DISAGG_WHOLE_GRIDS" in os.environ  # as `make test-bench` sets it


def some(few: Sequence[Value], others: Iterable[Value]) -> list[Value]:
    """Those that each run has; `others` too, if all are wanted."""
    return [*few, *(each for each in others if IS_WHOLE and each not in few)]


def examples(number: int, **options: Any) -> settings:
    """Of hypothesis: so many for each run, and five times as many if all are wanted."""
    return settings(max_examples=5 * number if IS_WHOLE else number, **options)


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of a value of each axis, in which any two values of two axes meet.

    A fault that needs three certain values at once is found where all are wanted.
    """
    values = [list(axis) for axis in axes]
    combinations = list(itertools.product(*values))
    if IS_WHOLE:
        return combinations
    bits: dict[tuple[Any, ...], int] = {}  # one for each pair of places in two axes
    met = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        keys = itertools.combinations(enumerate(places), 2)
        met.append(sum(bits.setdefault(key, 1 << len(bits)) for key in keys))
    chosen, missing = [], (1 << len(bits)) - 1
    for num_new in range(math.comb(len(values), 2), 0, -1):  # those with most new pairs first
        for combination, own in zip(combinations, met, strict=True):
            if (own & missing).bit_count() == num_new:
                chosen.append(combination)
                missing &= ~own
    return chosen
