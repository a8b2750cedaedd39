"""Requests that wait in the admission queue, and the speed at which a model's queue moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from disagg.messages import GenerateRequest
from disagg.router.fair_queue import FairQueue

# The speed of a queue is learned from about the last so many requests that left it, or from those
# of the last so many seconds if these are more.
PACE_MEMORY, PACE_MEMORY_S = 64.0, 10.0


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
    """The waiting requests of one model, and the learned speed at which they leave.

    It is learned over some seconds, because waits of seconds are predicted from it. While clients
    send many requests at once, the machine reads them, and those few that leave meanwhile say
    little about the rest. Before any has left, workers are assumed to take as long as the time
    model says.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self.queue: FairQueue[WaitingRequest] = FairQueue(weight)
        self._seconds = PACE_MEMORY_S
        self._work_s = PACE_MEMORY_S  # done in these seconds by each worker, as predicted
        self._since: float | None = None  # time of the last departure; None if the queue was empty

    def starts_waiting(self) -> None:
        """A request is about to wait."""
        if not self.queue:
            self._since = None

    def pause(self, seconds: float) -> None:
        """For so long this process was busy or not running, and no worker got a request."""
        if self._since is not None:
            self._since += seconds

    def moved(self, cost_s: float, now: float, num_workers: int) -> None:
        """A request of `cost_s` seconds of work was sent to a worker."""
        if self._since is not None:
            took_s = max(0.0, now - self._since)
            keep = 1.0 - min(1.0 / PACE_MEMORY, took_s / PACE_MEMORY_S)
            self._seconds = keep * self._seconds + took_s
            self._work_s = keep * self._work_s + cost_s / num_workers
        self._since = now if self.queue else None

    def seconds(self, cost_s: float, num_workers: int) -> float:
        """Predicted time until `cost_s` of waiting work has gone to the workers."""
        return cost_s / num_workers * self._seconds / self._work_s
