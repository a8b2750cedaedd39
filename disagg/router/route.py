"""A routing decision: the candidates, and the chosen route."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from disagg import telemetry

# Why the prompt is computed on the decode worker (local) or on another worker (remote):
# "other_unavailable": there was no route of the other kind;
# "compute": it takes less time there, because more is cached or the worker is faster;
# "queue": the queue there is shorter;
# "transfer_or_decode": no KV has to move, or no running decodes are delayed.
Cause: TypeAlias = Literal["other_unavailable", "compute", "queue", "transfer_or_decode"]


class Candidate(msgspec.Struct, frozen=True):
    """One possible route, with predicted seconds.

    `own_s` is the TTFT on idle workers. `wait_s` is what other requests add: the queue before it,
    or the wait for a place in the decode batch.
    """

    prefill: str | None  # None: local prefill, on the decode worker
    decode: str
    own_s: float
    wait_s: float
    first_token_s: float  # predicted TTFT: own_s and wait_s, as far as they precede the first token
    total_s: float  # the cost: with transfer, decode, and the delay of other requests
    num_cached_tokens: int
    prefix_source: str | None = None  # the worker to pull the cached tokens from first
    beside_s: float = 0.0  # of wait_s: what streams that begin before its prompt is done add

    @property
    def queue_s(self) -> float:
        """Seconds until a worker begins to compute the prompt."""
        return self.wait_s - self.beside_s


class Route(msgspec.Struct, frozen=True):
    """The chosen route and its alternatives."""

    prefill: str | None
    decode: str
    predicted_s: float  # to the first token
    num_cached_tokens: int  # predicted
    candidates: tuple[Candidate, ...]  # cheapest first; includes the chosen one and both kinds
    reason: str
    prefix_source: str | None = None
    cause: Cause = "other_unavailable"

    @property
    def chosen(self) -> Candidate:
        way = (self.prefill, self.decode, self.prefix_source)
        return next(c for c in self.candidates if (c.prefill, c.decode, c.prefix_source) == way)

    def instead(self, candidate: Candidate, reason: str) -> Route:
        """The same decision with another outcome."""
        return Route(
            candidate.prefill,
            candidate.decode,
            candidate.first_token_s,
            candidate.num_cached_tokens,
            self.candidates,
            reason,
            candidate.prefix_source,
            "queue",
        )


def describe(route: Route, because: str, span: telemetry.Span) -> None:
    """The decision with its candidates, as attributes of its span."""
    span.set("disagg.route.prefill", route.prefill or "")
    span.set("disagg.route.decode", route.decode)
    span.set("disagg.route.prefix_source", route.prefix_source or "")
    span.set("disagg.route.predicted_s", route.predicted_s)
    span.set("disagg.route.num_cached_tokens", route.num_cached_tokens)
    span.set("disagg.route.cause", "moved" if because else route.cause)
    span.set("disagg.route.reason", route.reason)
    span.set("disagg.route.moved_because", because)
    span.set(
        "disagg.route.candidates",
        [
            f"{each.prefill or '-'} > {each.decode}: {each.total_s:.6f} s"
            for each in route.candidates
        ],
    )
