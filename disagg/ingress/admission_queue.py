"""The queue of an ingress: requests wait here while workers are busy, or while there are none.

Workers serve in order of arrival and do not know tenants, so a thousand requests of one tenant on
them would delay all others. Therefore a worker gets only enough requests to stay busy. The others
wait here in the order of `router/fair_queue.py`, within a limit of bytes. A request that is
predicted to miss its TTFT SLO or its deadline is refused on arrival; one that becomes too late
while it waits is refused as soon as that is certain. Both get a `Retry-After` with the predicted
seconds. Requests that may wait until their model has a worker do so in order of arrival: their
work cannot be predicted before.

While no worker has a queue, nothing waits here and a request costs one comparison. This module
works with routes and predicted times; `ingress/dispatch.py` chooses routes and sends requests.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from disagg import telemetry
from disagg.errors import Overloaded, Unavailable
from disagg.messages import GenerateRequest
from disagg.router.admission import admit, limit_s
from disagg.router.fair_queue import FairQueue, Waiter
from disagg.router.fleet import Fleet
from disagg.router.policy import expected_output
from disagg.router.route import Candidate, Route
from disagg.time_model import CHUNK_TOKENS

# A worker gets a new request at once if it has less queued work than two full steps. So it stays
# busy until its next report has arrived here and our next request has arrived there.
NUM_STEPS_AHEAD = 2
LEAST_AHEAD_S = 0.1
POLL_S = 0.01  # between two checks for room; a tenth of `LEAST_AHEAD_S`

# The speed of a queue is learned from about the last so many requests that left it, or from those
# of the last so many seconds if these are more.
PACE_MEMORY, PACE_MEMORY_S = 64.0, 10.0

# Memory per token of a waiting request: an integer, its slot, its share of a block's hash.
TOKEN_NBYTES = 40
REQUEST_NBYTES = 1024
DEFAULT_MAX_NBYTES = 256 << 20


class Queued(msgspec.Struct, frozen=True):
    """The wait of one request, for traces and `GET /debug/requests/{id}`."""

    tenant: str
    priority: int
    num_before: int  # requests that waited when it arrived
    predicted_s: float
    waited_s: float


class Charge(msgspec.Struct, frozen=True):
    """The charge of a request's tenant, for its prompt and an answer of the expected length."""

    model: str
    tenant: str
    cost_s: float
    token_s: float  # charge for each token of the answer
    num_expected: int


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingRequest(Waiter):
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

    def to_queued(self, now: float) -> Queued:
        request, waited_s = self.request, now - self.began_s
        return Queued(request.tenant, request.priority, self.num_before, self.predicted_s, waited_s)


class ModelQueue(FairQueue[WaitingRequest]):
    """The waiting requests of one model, and the learned speed at which they leave.

    It is learned over some seconds, because waits of seconds are predicted from it. While clients
    send many requests at once, the machine reads them, and those few that leave meanwhile say
    little about the rest. Before any has left, workers are assumed to take as long as the time
    model says.

    Attributes:
        unserved: requests that wait until there is a worker, in order of arrival.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        super().__init__(weight)
        self.unserved: deque[asyncio.Future[None]] = deque()
        self._seconds = PACE_MEMORY_S
        self._work_s = PACE_MEMORY_S  # done in these seconds by each worker, as predicted
        self._since: float | None = None  # time of the last departure; None if the queue was empty

    def starts_waiting(self) -> None:
        """A request is about to wait."""
        if not self:
            self._since = None

    def pause(self, seconds: float) -> None:
        """For so long this process was busy or not running, and no worker got a request."""
        if self._since is not None:
            self._since += seconds

    def record_departure(self, cost_s: float, now: float, num_workers: int) -> None:
        """A request of `cost_s` seconds of work was sent to a worker."""
        if self._since is not None:
            took_s = max(0.0, now - self._since)
            keep = 1.0 - min(1.0 / PACE_MEMORY, took_s / PACE_MEMORY_S)
            self._seconds = keep * self._seconds + took_s
            self._work_s = keep * self._work_s + cost_s / num_workers
        self._since = now if self else None

    def seconds(self, cost_s: float, num_workers: int) -> float:
        """Predicted time until `cost_s` of waiting work has gone to the workers."""
        return cost_s / num_workers * self._seconds / self._work_s


class AdmissionQueue:
    """Decides which requests go to the workers of one fleet now, and which wait.

    Args:
        now: returns Unix time in seconds.
        weight: returns a tenant's share by name.
        max_nbytes: limit of the memory of all waiting requests.
        waited: called with tenant and seconds when a request that waited is sent.
        is_fair: whether requests wait for room here; otherwise only for a worker.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        now: Callable[[], float],
        weight: Callable[[str], float] = lambda tenant: 1.0,
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        waited: Callable[[str, float], None] = lambda tenant, seconds: None,
        is_fair: bool = True,
    ) -> None:
        self.is_fair = is_fair
        self._fleet = fleet
        self._now = now
        self._weight = weight
        self._max_nbytes = max_nbytes
        self._waited = waited
        self._queues: dict[str, ModelQueue] = {}  # by model
        self._num = 0  # number of requests that have ever waited
        self._timer: asyncio.TimerHandle | None = None
        fleet.on_available.append(self.wake)

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self._queues.values())

    def num_by_tenant(self) -> dict[str, int]:
        return sum((Counter(line.num_by_tenant()) for line in self._queues.values()), Counter())

    def num_uncomputed_tokens(self, model: str) -> int:
        """Number of uncached tokens of the prompts that wait for workers of `model`."""
        line = self._queues.get(model)
        return sum(each.num_uncomputed_tokens for each in line or ())

    def with_room(self, model: str, route: Route) -> Route | None:
        """The route to take now; None if the request should wait.

        It is `route` if that worker can begin soon. Otherwise it is the other kind of prefill
        (local instead of remote, or the reverse), if its extra cost is less than the saved wait.
        """
        chosen = route.chosen
        if chosen.queue_s <= LEAST_AHEAD_S:
            return route
        is_local = chosen.prefill is None
        least_s, other = math.inf, None
        for each in route.candidates:
            if (each.prefill is None) == is_local:
                least_s = min(least_s, each.queue_s)
            elif other is None:
                other = each
        if least_s <= self._ahead_s(chosen):
            return route
        num_waiting = self._fleet.queued.get(model, 0)
        if other is None or not num_waiting or other.queue_s > self._ahead_s(other):
            return None
        saved_s = num_waiting * chosen.own_s / self._num_workers(model)
        if other.total_s - chosen.total_s > saved_s:
            return None
        return route.instead(
            other, f"the cheaper route is full and {num_waiting} requests wait for it"
        )

    def _ahead_s(self, route: Candidate) -> float:
        """Seconds of work that may be queued on a worker when it gets another request."""
        worker = self._fleet.view().workers[route.prefill or route.decode]
        return max(LEAST_AHEAD_S, NUM_STEPS_AHEAD * worker.times.prefill_s(CHUNK_TOKENS))

    def goes_at_once(self, request: GenerateRequest, route: Route) -> bool:
        """Whether no other request of its model waits and a worker has room."""
        line = self._queues.get(request.model)
        return not line and self.with_room(request.model, route) is route

    def charge(self, request: GenerateRequest, route: Route) -> Charge:
        """The charge for a request: predicted engine seconds, with its share of decode steps."""
        view = self._fleet.view()
        worker = view.workers[route.decode]
        num_others, num_tokens = worker.num_decoding, len(request.token_ids)
        step_s = worker.times.decode_step_s(num_others + 1, worker.num_context_tokens + num_tokens)
        token_s = step_s / (num_others + 1)
        num_expected = expected_output(request, view.answers.usual(request.model))
        cost_s = route.chosen.own_s + token_s * num_expected
        return Charge(request.model, request.tenant, cost_s, token_s, num_expected)

    def pass_by(self, charge: Charge) -> None:
        """Charge the tenant of a request that is sent to a worker without waiting."""
        self._line(charge.model).pass_by(charge.tenant, charge.cost_s)

    def end(self, charge: Charge, num_output_tokens: int) -> None:
        """Correct the charge: the answer had `num_output_tokens` instead of the expected number."""
        more_s = charge.token_s * (num_output_tokens - charge.num_expected)
        self._line(charge.model).correct(charge.tenant, more_s)

    async def wait(
        self,
        request: GenerateRequest,
        route: Candidate,
        charge: Charge,
        set_out: Callable[[Queued], bool],
    ) -> None:
        """Return when `set_out` has sent the request to a worker.

        Args:
            route: the route that was chosen on arrival.
            set_out: called when the request is first in the queue; returns False if no worker has
                room yet. Its exceptions other than `Unavailable` and `Overloaded` are raised here.

        Raises:
            Overloaded: the first token would be too late, or the queue is full.
        """
        line, self._num = self._line(request.model), self._num + 1
        waiter = WaitingRequest(
            request.tenant,
            charge.cost_s,
            REQUEST_NBYTES + TOKEN_NBYTES * len(request.token_ids) + sum(map(len, request.images)),
            (request.priority, request.deadline_unix_s, self._num),
            request=request,
            set_out=set_out,
            began_s=self._now(),
            num_before=len(line),
            num_uncomputed_tokens=len(request.token_ids) - route.num_cached_tokens,
        )
        line.starts_waiting()
        waiter.predicted_s = self._wait_s(line, waiter)
        may_wait_s = self._check_time(request, route, waiter.predicted_s)
        self._make_room(line, waiter)
        line.push(waiter)
        self._count(request.model, line)
        self._release_later()
        try:
            async with asyncio.timeout(may_wait_s):
                await waiter.turn
        except TimeoutError:
            wait_s = self._wait_s(line, waiter)
            self._fleet.first_tokens[request.model].refuse()
            raise Overloaded(
                "All workers were busy for as long as this request could wait."
                f" Try again in {max(1, math.ceil(wait_s))} s.",
                retry_after_s=wait_s,
                reason="became_late",
            ) from None
        finally:
            line.remove(waiter)
            self._count(request.model, line)

    def has_worker(self, model: str) -> bool:
        return self._fleet.view().num_accepting(model) > 0

    async def wait_for_worker(self, model: str, timeout_s: float, *, again: bool) -> None:
        """Return when `model` may have a worker, or after `timeout_s`.

        One request at a time is woken. It calls `wake` after it is routed or has given up, so that
        the next one sees a fleet in which it is already counted.

        Args:
            again: whether the request was woken before and found no worker; it keeps its place.
        """
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unserved = self._line(model).unserved
        (unserved.appendleft if again else unserved.append)(woken)
        is_cancelled = True
        try:
            await asyncio.wait([woken], timeout=timeout_s)
            is_cancelled = False
        finally:
            if not woken.done():
                unserved.remove(woken)
            elif is_cancelled:
                self.wake(model)  # this request was woken but is cancelled, so wake the next one

    def wake(self, model: str) -> None:
        """Wake the first request that still waits for a worker."""
        unserved = self._line(model).unserved
        while unserved:
            first = unserved.popleft()
            if not first.done():
                first.set_result(None)
                return

    def _check_time(
        self, request: GenerateRequest, route: Candidate, predicted_s: float
    ) -> float | None:
        """Seconds that the request may wait; None for no limit.

        Raises:
            Overloaded: the first token is predicted to be too late.
        """
        learned = self._fleet.first_tokens[request.model]
        slo_s = request.ttft_slo_s or math.inf
        left_s = request.deadline_unix_s - self._now()
        waiting = msgspec.structs.replace(route, wait_s=route.wait_s + predicted_s)
        admit([waiting], slo_s, left_s, learned)
        may_wait_s = limit_s(route, slo_s, left_s) - route.own_s - LEAST_AHEAD_S
        return None if math.isinf(may_wait_s) else max(0.0, may_wait_s)

    def _make_room(self, line: ModelQueue, waiter: WaitingRequest) -> None:
        """If the queue is full, refuse requests of the tenant that uses the most of it.

        That is the tenant with the most bytes for its weight in the queue of one model, so that a
        flood on one model does not push out requests of other models. Its last request is refused.

        Raises:
            Overloaded: that tenant is the one of the new request.
        """
        while self.nbytes + waiter.nbytes > self._max_nbytes:
            lasts = [(each, last) for each in self._queues.values() if (last := each.longest())]
            taken = [each.room_taken(last.tenant, 0) for each, last in lasts]
            most = max(taken, default=0.0)
            if most <= line.room_taken(waiter.tenant, waiter.nbytes):
                raise self._full(waiter.predicted_s)
            largest, last = lasts[taken.index(most)]
            gone_s = self._wait_s(largest, last)
            largest.remove(last)
            self._count(last.request.model, largest)
            if not last.turn.done():
                last.turn.set_exception(self._full(gone_s))

    def _full(self, wait_s: float) -> Overloaded:
        return Overloaded(
            f"The admission queue is full ({self._max_nbytes} bytes, http.max_queue_nbytes).",
            retry_after_s=wait_s,
            reason="queue_full",
        )

    def _wait_s(self, line: ModelQueue, waiter: WaitingRequest) -> float:
        """The predicted wait of a request, by the work ahead of it."""
        return line.seconds(line.ahead_s(waiter), self._num_workers(waiter.request.model))

    def _num_workers(self, model: str) -> int:
        return max(1, self._fleet.view().num_accepting(model))

    def _line(self, model: str) -> ModelQueue:
        line = self._queues.get(model)
        if line is None:
            line = self._queues[model] = ModelQueue(self._weight)
        return line

    def _count(self, model: str, line: ModelQueue) -> None:
        self._fleet.queued[model] = len(line)

    def _release_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._release_waiting)

    def _release_waiting(self) -> None:
        """Send requests from the head of each queue as long as workers have room."""
        assert self._timer is not None
        late_s = asyncio.get_running_loop().time() - self._timer.when()
        self._timer = None
        for model, line in self._queues.items():
            if late_s > POLL_S:
                line.pause(late_s)
            while self._release_head(line):
                self._count(model, line)
        if any(self._queues.values()):
            self._release_later()

    def _release_head(self, line: ModelQueue) -> bool:
        """Try to send the first request. Returns True if it left the queue, sent or failed."""
        waiter = line.first()
        if waiter is None:
            return False
        turn = waiter.turn
        if turn.done():  # the request is cancelled, but its task has not removed it yet
            line.remove(waiter)
            return True
        queued = waiter.to_queued(self._now())
        try:
            if not waiter.set_out(queued):
                return False
        except (Unavailable, Overloaded):
            return False
        except Exception as error:  # raised in the task that waits for the request
            line.remove(waiter)
            turn.set_exception(error)
            return True
        line.serve(waiter)
        num_workers = self._num_workers(waiter.request.model)
        line.record_departure(waiter.cost_s, asyncio.get_running_loop().time(), num_workers)
        turn.set_result(None)
        self._record_wait(waiter, queued)
        return True

    def _record_wait(self, waiter: WaitingRequest, queued: Queued) -> None:
        self._waited(queued.tenant, queued.waited_s)
        if telemetry.enabled():
            attributes = {
                "disagg.queue.priority": queued.priority,
                "disagg.queue.num_before": queued.num_before,
                "disagg.queue.predicted_s": queued.predicted_s,
            }
            ended_s = waiter.began_s + queued.waited_s
            traceparent = waiter.request.traceparent
            telemetry.record_span("queue", traceparent, waiter.began_s, ended_s, attributes)
