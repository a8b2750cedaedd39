"""Few combinations of many parameters."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from typing import Any

WHOLE = "DISAGG_WHOLE_GRIDS"  # set by `make test-bench`


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of a value of each axis, in which any two values of two axes meet.

    A fault that needs three certain values at once is left to `make test-bench`, which has all.
    """
    values = [list(axis) for axis in axes]
    combinations = list(itertools.product(*values))
    if WHOLE in os.environ:
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
