"""Non-negative least squares on relative errors, improved by one sweep per observation.

Normal equations of rows whose target is 1, forgotten exponentially, and coordinate descent from
where it ended (Franc, Hlaváč and Navara, 2005). `time_model` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

PULL_TO_PRIOR = 1e-4


class Evidence:
    """Decayed normal equations of rows whose target is 1: sums of x xT and of x."""

    __slots__ = ("_forgetting", "products", "sums")

    def __init__(self, num_features: int, forgetting: float) -> None:
        self.products = [[0.0] * num_features for _ in range(num_features)]
        self.sums = [0.0] * num_features
        self._forgetting = forgetting

    def add(self, row: Sequence[float]) -> None:
        keep = self._forgetting
        self.sums = [keep * old + x for old, x in zip(self.sums, row, strict=True)]
        for i, x in enumerate(row):
            if x:
                self.products[i] = [
                    keep * old + x * y for old, y in zip(self.products[i], row, strict=True)
                ]
            else:
                self.products[i] = [keep * old for old in self.products[i]]

    def rescale(self, factor: float) -> None:
        """As if each observation had taken 1 / `factor` of its time."""
        self.sums = [factor * each for each in self.sums]
        self.products = [[factor * factor * each for each in row] for row in self.products]


class Solver:
    """Non-negative coefficients in units of the prior's, improved sweep by sweep."""

    def __init__(self, prior: Sequence[float]) -> None:
        if min(prior) <= 0:
            raise ValueError(f"Every prior coefficient must be > 0, got {tuple(prior)}")
        self._prior = tuple(prior)
        self._scaled = [1.0] * len(self._prior)

    def coefficients(self) -> tuple[float, ...]:
        return tuple(p * a for p, a in zip(self._prior, self._scaled, strict=True))

    def rescale(self, factor: float) -> None:
        self._scaled = [factor * each for each in self._scaled]

    def relative(self, row: Sequence[float], seconds: float) -> list[float]:
        """`row` in units in which the right coefficients give 1."""
        return [p * x / seconds for p, x in zip(self._prior, row, strict=True)]

    def predict(self, relative_row: Sequence[float]) -> float:
        total: float = sum(map(mul, self._scaled, relative_row))
        return total

    def sweep(self, *evidence: Evidence) -> None:
        """One pass of coordinate descent on the sum of the evidence and the pull to the prior."""
        scaled = self._scaled
        for i in range(len(scaled)):
            diagonal = PULL_TO_PRIOR
            slope = PULL_TO_PRIOR * (1.0 - scaled[i])
            for part in evidence:
                products = part.products[i]
                diagonal += products[i]
                slope += part.sums[i]
                slope -= sum(map(mul, scaled, products))
            scaled[i] = max(0.0, scaled[i] + slope / diagonal)
