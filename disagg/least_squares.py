"""Non-negative least squares on relative errors, improved by one sweep per observation.

Normal equations of rows whose target is 1, forgotten exponentially, and coordinate descent from
where it ended (Franc, Hlaváč and Navara, 2005). `time_model` says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import mul

PULL_TO_PRIOR = 1e-4
NUM_ERRORS_KEPT = 65


class Evidence:
    """Decayed normal equations of rows whose target is 1: sums of x xT and of x.

    Attributes:
        num_added: rows so far, but for those that were `assumed`.
    """

    __slots__ = ("_forgetting", "_num_assumed", "num_added", "products", "sums")

    def __init__(self, num_features: int, forgetting: float) -> None:
        self.products = [[0.0] * num_features for _ in range(num_features)]
        self.sums = [0.0] * num_features
        self._forgetting = forgetting
        self._num_assumed = 0
        self.num_added = 0

    def assume(self, rows: Sequence[Sequence[float]], number: int) -> None:
        """Let `rows` stand for `number` real ones, before the first of these.

        The first real row replaces them, and gets their whole weight. The next ones share this
        weight equally, until there are `number` real rows.
        """
        for row in rows:
            self._add(row, number / len(rows), 1.0)
        self._num_assumed = number

    def add(self, row: Sequence[float]) -> None:
        self.num_added += 1
        if self.num_added > self._num_assumed:
            self._add(row, 1.0, self._forgetting)
        else:
            share = 1.0 / self.num_added
            self._add(row, share * self._num_assumed, 1.0 - share)

    def _add(self, row: Sequence[float], weight: float, keep: float) -> None:
        self.sums = [keep * old + weight * x for old, x in zip(self.sums, row, strict=True)]
        for i, x in enumerate(row):
            if x:
                x *= weight
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
    """Non-negative coefficients, each in a unit of its own, improved sweep by sweep.

    Args:
        prior: the coefficients before the first sweep.
        units: the usual size of each coefficient; its prior if left out. The larger the unit, the
            larger the part that a coefficient takes of what a row leaves unexplained.
        pull: to the prior, as so many rows that show one coefficient alone.
    """

    def __init__(
        self, prior: Sequence[float], units: Sequence[float] = (), pull: float = PULL_TO_PRIOR
    ) -> None:
        self._units = tuple(units or prior)
        if min(self._units) <= 0:
            raise ValueError(f"Every prior coefficient must be > 0, got {self._units}")
        self._prior = [p / unit for p, unit in zip(prior, self._units, strict=True)]
        self._scaled = self._prior[:]
        self._pull = pull

    def coefficients(self) -> tuple[float, ...]:
        return tuple(unit * a for unit, a in zip(self._units, self._scaled, strict=True))

    def rescale(self, factor: float) -> None:
        self._scaled = [factor * each for each in self._scaled]

    def relative(self, row: Sequence[float], seconds: float) -> list[float]:
        """`row` in units in which the right coefficients give 1."""
        return [unit * x / seconds for unit, x in zip(self._units, row, strict=True)]

    def predict(self, relative_row: Sequence[float]) -> float:
        total: float = sum(map(mul, self._scaled, relative_row))
        return total

    def sweep(self, *evidence: Evidence) -> None:
        """One pass of coordinate descent on the sum of the evidence and the pull to the prior."""
        scaled = self._scaled
        for i in range(len(scaled)):
            diagonal = self._pull
            slope = self._pull * (self._prior[i] - scaled[i])
            for part in evidence:
                products = part.products[i]
                diagonal += products[i]
                slope += part.sums[i]
                slope -= sum(map(mul, scaled, products))
            scaled[i] = max(0.0, scaled[i] + slope / diagonal)


class RecentErrors:
    """The median of the last few; sorted only when asked for."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS_KEPT)

    def add(self, error: float) -> None:
        self._errors.append(error)

    def median(self) -> float:
        if not self._errors:
            return 0.0
        return sorted(self._errors)[len(self._errors) // 2]
