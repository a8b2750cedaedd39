"""What a routing decision consists of: the ways a request could take, and the one it takes."""

from __future__ import annotations

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """One way to serve a request, in predicted seconds.

    The first token comes after `own_s` on workers that have nothing else to do. `wait_s` is what
    others add: the queue before it, or the wait for a place in the batch where it decodes.
    """

    prefill: str | None  # None: on the decode worker
    decode: str
    own_s: float
    wait_s: float
    first_token_s: float  # both, as far as they come before the first token
    total_s: float  # with transfer, decode, and what others wait because of it
    num_cached_tokens: int


class Route(msgspec.Struct, frozen=True):
    """The chosen way, and what it was chosen from."""

    prefill: str | None
    decode: str
    predicted_s: float  # to the first token
    num_cached_tokens: int  # predicted
    candidates: tuple[Candidate, ...]  # cheapest first, the chosen one and both kinds among them
    reason: str

    @property
    def chosen(self) -> Candidate:
        way = (self.prefill, self.decode)
        return next(each for each in self.candidates if (each.prefill, each.decode) == way)

    def instead(self, candidate: Candidate, reason: str) -> Route:
        """The same decision with another outcome."""
        return Route(
            candidate.prefill,
            candidate.decode,
            candidate.first_token_s,
            candidate.num_cached_tokens,
            self.candidates,
            reason,
        )
