"""The load of a tier: requests and tokens, counted on arrival in an ingress.

Counters only grow: the difference of two reads is the load between them, and those of several
ingresses add up. Refused requests count too, since they are part of the demand.
"""

from __future__ import annotations

from typing import NamedTuple


class RequestTotals(NamedTuple):
    num_requests: float = 0.0
    num_prompt_tokens: float = 0.0
    num_cached_tokens: float = 0.0  # of these, cached on the chosen worker
    num_output_tokens: float = 0.0  # expected: each answer counts with the usual length
    num_squared_tokens: float = 0.0  # sum of the squares of the prompts' lengths

    def plus(self, other: RequestTotals) -> RequestTotals:
        return RequestTotals(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def length_variability(self) -> float:
        """Variance of the prompts' lengths over their squared mean."""
        mean = self.num_prompt_tokens / self.num_requests if self.num_requests else 0.0
        if not mean:
            return 0.0
        return max(0.0, self.num_squared_tokens / self.num_requests / mean**2 - 1.0)

    def since(self, before: RequestTotals) -> RequestTotals:
        return RequestTotals(*(now - then for now, then in zip(self, before, strict=True)))


class Demand:
    """Totals of one ingress since its start, by model."""

    def __init__(self) -> None:
        self._asked: dict[str, RequestTotals] = {}

    def of(self, model: str) -> RequestTotals:
        return self._asked.get(model, RequestTotals())

    def arrived(self, model: str, num_prompt_tokens: int, usual_output_tokens: float) -> None:
        """Count a request, whether it is served or refused."""
        squared = float(num_prompt_tokens) ** 2
        one = RequestTotals(1.0, num_prompt_tokens, 0.0, usual_output_tokens, squared)
        self._asked[model] = self.of(model).plus(one)

    def hit(self, model: str, num_cached_tokens: int) -> None:
        """Count prompt tokens that were cached on the chosen worker."""
        self._asked[model] = self.of(model).plus(RequestTotals(0.0, 0.0, num_cached_tokens))
