"""What is asked of a tier: requests and their tokens, counted where they arrive.

Counters only grow, so whoever reads them twice knows what came between, and those of several
ingresses add up. Refused requests count: what could not be served is part of what is asked.
"""

from __future__ import annotations

from typing import NamedTuple


class Asked(NamedTuple):
    num_requests: float = 0.0
    num_prompt_tokens: float = 0.0
    num_cached_tokens: float = 0.0  # of these, what a worker had
    num_output_tokens: float = 0.0  # as long as answers usually are

    def plus(self, other: Asked) -> Asked:
        return Asked(*(mine + its for mine, its in zip(self, other, strict=True)))

    def since(self, before: Asked) -> Asked:
        return Asked(*(now - then for now, then in zip(self, before, strict=True)))


class Demand:
    """All that was ever asked in one ingress, by model."""

    def __init__(self) -> None:
        self._asked: dict[str, Asked] = {}

    def of(self, model: str) -> Asked:
        return self._asked.get(model, Asked())

    def arrived(self, model: str, num_prompt_tokens: int, usual_output_tokens: float) -> None:
        """A request, whatever becomes of it."""
        one = Asked(1.0, num_prompt_tokens, 0.0, usual_output_tokens)
        self._asked[model] = self.of(model).plus(one)

    def hit(self, model: str, num_cached_tokens: int) -> None:
        """So many tokens of a request that arrived need not be computed."""
        self._asked[model] = self.of(model).plus(Asked(0.0, 0.0, num_cached_tokens))
