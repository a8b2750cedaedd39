"""Requests that wait in the admission queue, and the speed at which a model's queue moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from disagg.messages import GenerateRequest
from disagg.router.fair_queue import FairQueue

PACE_MEMORY = 64.0  # number of requests that left a queue from which its speed is learned
PACE_PRIOR = 4.0  # number of requests for which the prior speed counts


class Queued(msgspec.Struct, frozen=True):
    """The wait of one request, for traces and `GET /debug/requests/{id}`."""

    tenant: str
    priority: int
    num_before: int  # requests that waited when it arrived
    predicted_s: float
    waited_s: float


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One request in the queue. Create it inside the event loop in which it waits."""

    request: GenerateRequest
    set_out: Callable[[Queued], bool]  # sends it to a worker; False if none has room
    began_s: float  # Unix time of its arrival
    num_before: int  # requests that waited when it arrived
    num_uncomputed_tokens: int  # predicted number of prompt tokens that are not cached
    predicted_s: float = 0.0
    turn: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def queued(self, now: float) -> Queued:
        request, waited_s = self.request, now - self.began_s
        return Queued(request.tenant, request.priority, self.num_before, self.predicted_s, waited_s)


class ModelQueue:
    """The waiting requests of one model, and the learned speed at which they leave."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self.queue: FairQueue[WaitingRequest] = FairQueue(weight)
        self._seconds = 0.0
        self._cost_s = 0.0
        self._since: float | None = None  # time of the last departure; None if the queue was empty

    def expect(self, pace: float, cost_s: float) -> None:
        """A request starts to wait.

        Until a speed is learned it is `pace`, in seconds of waiting per second of work.
        """
        if not self.queue:
            self._since = None
        if not self._cost_s:
            self._cost_s = PACE_PRIOR * cost_s
            self._seconds = pace * self._cost_s

    def moved(self, cost_s: float, now: float) -> None:
        """A request of `cost_s` seconds of work was sent to a worker."""
        if self._since is not None:
            keep = 1.0 - 1.0 / PACE_MEMORY
            self._seconds = keep * self._seconds + (now - self._since)
            self._cost_s = keep * self._cost_s + cost_s
        self._since = now if self.queue else None

    def seconds(self, cost_s: float) -> float:
        """Predicted time until `cost_s` of waiting work has gone to the workers."""
        return cost_s * self._seconds / self._cost_s if self._cost_s else 0.0
