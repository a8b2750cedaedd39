"""What an ingress remembers of its last requests: their routes, and what became of each."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from disagg.ingress.admission_queue import Queued
from disagg.messages import TokenDelta
from disagg.router.route import Route

T = TypeVar("T")


class RecentRequests(Generic[T]):
    """A value for each of the last `max_num` requests; older ones are forgotten."""

    def __init__(self, max_num: int) -> None:
        self.max_num = max_num
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, request_id: str) -> T | None:
        return self._values.get(request_id)

    def put(self, request_id: str, value: T) -> None:
        self._values[request_id] = value
        self._values.move_to_end(request_id)
        while len(self._values) > self.max_num:
            self._values.popitem(last=False)


class WorkerVisit(msgspec.Struct):
    """What happened to a request on one worker, as measured, for `GET /debug/requests/{id}`.

    The times are those of `messages.StageTimes`, and None before the worker's first token. The
    tokens of `num_tokens` were made here; `num_cached_tokens` of the prompt were not computed here.
    """

    worker_id: str
    began_unix_s: float
    first_token_unix_s: float | None = None
    ended_unix_s: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float | None = None
    pull_s: float | None = None
    compute_s: float | None = None
    pull_nbytes: int = 0
    pull_lane: str = ""

    def begin(self, now: float, delta: TokenDelta) -> None:
        """The first tokens of the worker have come."""
        self.first_token_unix_s, self.num_cached_tokens = now, delta.num_cached_tokens
        if delta.times is not None:
            times = delta.times
            self.queue_s, self.pull_s, self.compute_s = times.queue_s, times.pull_s, times.compute_s
            self.pull_nbytes, self.pull_lane = times.pull_nbytes, times.pull_lane


class Decision(msgspec.Struct, frozen=True):
    """One routing decision, for traces and `GET /debug/requests/{id}`."""

    unix_s: float
    route: Route
    num_tokens: int  # prompt and output so far
    because: str  # the error that caused the rerouting; "" for the first route
    tenant: str  # the request's tenant; only this tenant may see the decision
    queued: Queued | None = None  # the wait in the admission queue; None if it did not wait
    model: str = ""
    visits: list[WorkerVisit] = []  # in order; grows while the request runs
