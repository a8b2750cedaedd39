"""The admission queue of an ingress: requests wait here, fairly by tenant, while workers are busy.

Workers serve in order of arrival and do not know tenants, so a thousand requests of one tenant on
them would delay all others. Therefore a worker gets only enough requests to stay busy. The others
wait here in the order of `router/fair_queue.py`, within a limit of bytes. A request that is
predicted to miss its TTFT SLO or its deadline is refused on arrival; one that becomes too late
while it waits is refused as soon as that is certain. Both get a `Retry-After` with the predicted
seconds.

While no worker has a queue, nothing waits here and a request costs one comparison. This module
works with routes and predicted times; `ingress/dispatch.py` chooses routes and sends requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from disagg import telemetry
from disagg.errors import Overloaded, Unavailable
from disagg.ingress.waiting import ModelQueue, Queued, WaitingRequest
from disagg.messages import GenerateRequest
from disagg.router.admission import allowed_s, lateness_s
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

# Memory per token of a waiting request: an integer, its slot, its share of a block's hash.
TOKEN_NBYTES = 40
REQUEST_NBYTES = 1024
DEFAULT_MAX_NBYTES = 256 << 20


class Charge(msgspec.Struct, frozen=True):
    """The charge of a request's tenant, for its prompt and an answer of the expected length."""

    model: str
    tenant: str
    cost_s: float
    token_s: float  # charge for each token of the answer
    num_expected: int


class AdmissionQueue:
    """Decides which requests go to the workers of one fleet now, and which wait.

    Args:
        now: returns Unix time in seconds.
        ttft_slo_s: TTFT SLO by model.
        weight: returns a tenant's share by name.
        max_nbytes: limit of the memory of all waiting requests.
        waited: called with tenant and seconds when a request that waited is sent.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        now: Callable[[], float],
        ttft_slo_s: Mapping[str, float] = MappingProxyType({}),
        weight: Callable[[str], float] = lambda tenant: 1.0,
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        waited: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        self._fleet = fleet
        self._now = now
        self._ttft_slo_s = ttft_slo_s
        self._weight = weight
        self._max_nbytes = max_nbytes
        self._waited = waited
        self._queues: dict[str, ModelQueue] = {}  # by model
        self._num = 0  # number of requests that have ever waited
        self._timer: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        return sum(line.queue.nbytes for line in self._queues.values())

    def num_by_tenant(self) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for line in self._queues.values():
            for tenant, number in line.queue.num_by_tenant().items():
                numbers[tenant] = numbers.get(tenant, 0) + number
        return numbers

    def num_uncomputed_tokens(self, model: str) -> int:
        """Number of uncached tokens of the prompts that wait for workers of `model`."""
        line = self._queues.get(model)
        return sum(each.item.num_uncomputed_tokens for each in line.queue) if line else 0

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
        return (line is None or not line.queue) and self.with_room(request.model, route) is route

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

    def passes_by(self, charge: Charge) -> None:
        """Charge the tenant of a request that is sent to a worker without waiting."""
        self._line(charge.model).queue.pass_by(charge.tenant, charge.cost_s)

    def end(self, charge: Charge, num_output_tokens: int) -> None:
        """Correct the charge: the answer had `num_output_tokens` instead of the expected number."""
        more_s = charge.token_s * (num_output_tokens - charge.num_expected)
        self._line(charge.model).queue.correct(charge.tenant, more_s)

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
        line = self._line(request.model)
        queue = line.queue
        num_uncomputed_tokens = len(request.token_ids) - route.num_cached_tokens
        item = WaitingRequest(request, set_out, self._now(), len(queue), num_uncomputed_tokens)
        waiter = self._waiter(request, charge, item)
        line.starts_waiting()
        item.predicted_s = line.seconds(queue.ahead_s(waiter), self._num_workers(request.model))
        may_wait_s = self._check_time(request, route, item.predicted_s)
        self._make_room(queue, waiter, item.predicted_s)
        queue.push(waiter)
        self._count(request.model, queue)
        self._release_later()
        try:
            async with asyncio.timeout(may_wait_s):
                await item.turn
        except TimeoutError:
            raise self._too_late(line, waiter) from None
        finally:
            queue.remove(waiter)
            self._count(request.model, queue)

    def _check_time(
        self, request: GenerateRequest, route: Candidate, predicted_s: float
    ) -> float | None:
        """Seconds that the request may wait; None for no limit.

        Raises:
            Overloaded: the first token is predicted to be too late.
        """
        delay = self._fleet.delays.factor(request.model)
        slo_s = request.ttft_slo_s or self._ttft_slo_s.get(request.model, math.inf)
        left_s = request.deadline_unix_s - self._now()
        waiting = msgspec.structs.replace(route, wait_s=route.wait_s + predicted_s)
        late_s = lateness_s(waiting, slo_s, left_s, delay)
        if late_s > 0.0:
            first_s = delay * (waiting.own_s + waiting.wait_s)
            raise Overloaded(
                f"All workers are busy: with the requests ahead of this one, its first token would"
                f" take about {first_s:.1f} s, and at most {min(slo_s, left_s):.1f} s are allowed."
                f" Try again in {math.ceil(late_s)} s.",
                retry_after_s=late_s,
                reason="predicted_late",
            )
        may_wait_s = allowed_s(route, slo_s, left_s) - delay * (route.own_s + LEAST_AHEAD_S)
        return None if math.isinf(may_wait_s) else max(0.0, may_wait_s)

    def _make_room(
        self, queue: FairQueue[WaitingRequest], waiter: Waiter[WaitingRequest], wait_s: float
    ) -> None:
        """If the queue is full, refuse requests of the tenant that uses the most of it.

        That is the tenant with the most bytes for its weight in the queue of one model, so that a
        flood on one model does not push out requests of other models. Its last request is refused.

        Raises:
            Overloaded: that tenant is the one of the new request.
        """
        while self.nbytes + waiter.nbytes > self._max_nbytes:
            model, last, taken = self._largest()
            mine = queue.room_taken(waiter.tenant, waiter.nbytes)
            if last is None or taken <= mine:
                raise _full(self._max_nbytes, wait_s)
            line = self._queues[model]
            gone_s = line.seconds(line.queue.ahead_s(last), self._num_workers(model))
            line.queue.remove(last)
            self._count(model, line.queue)
            if not last.item.turn.done():
                last.item.turn.set_exception(_full(self._max_nbytes, gone_s))

    def _largest(self) -> tuple[str, Waiter[WaitingRequest] | None, float]:
        """Find the tenant with the most bytes for its weight in the queue of one model.

        Returns:
            The model, the tenant's last request in its queue, and the bytes divided by the weight.
        """
        model, largest, most = "", None, 0.0
        for name, line in self._queues.items():
            last = line.queue.longest()
            taken = 0.0 if last is None else line.queue.room_taken(last.tenant, 0)
            if taken > most:
                model, largest, most = name, last, taken
        return model, largest, most

    def _too_late(self, line: ModelQueue, waiter: Waiter[WaitingRequest]) -> Overloaded:
        num_workers = self._num_workers(waiter.item.request.model)
        wait_s = line.seconds(line.queue.ahead_s(waiter), num_workers)
        return Overloaded(
            "All workers were busy for as long as this request could wait."
            f" Try again in {max(1, math.ceil(wait_s))} s.",
            retry_after_s=wait_s,
            reason="became_late",
        )

    def _waiter(
        self, request: GenerateRequest, charge: Charge, item: WaitingRequest
    ) -> Waiter[WaitingRequest]:
        self._num += 1
        return Waiter(
            request.tenant,
            charge.cost_s,
            REQUEST_NBYTES + TOKEN_NBYTES * len(request.token_ids),
            item,
            priority=request.priority,
            deadline_s=request.deadline_unix_s,
            number=self._num,
        )

    def _num_workers(self, model: str) -> int:
        return max(1, self._fleet.view().num_accepting(model))

    def _line(self, model: str) -> ModelQueue:
        line = self._queues.get(model)
        if line is None:
            line = self._queues[model] = ModelQueue(self._weight)
        return line

    def _count(self, model: str, queue: FairQueue[WaitingRequest]) -> None:
        self._fleet.queued[model] = len(queue)

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
                self._count(model, line.queue)
        if any(line.queue for line in self._queues.values()):
            self._release_later()

    def _release_head(self, line: ModelQueue) -> bool:
        """Try to send the first request. Returns True if it left the queue, sent or failed."""
        waiter = line.queue.first()
        if waiter is None:
            return False
        turn = waiter.item.turn
        if turn.done():  # the request is cancelled, but its task has not removed it yet
            line.queue.remove(waiter)
            return True
        queued = waiter.item.queued(self._now())
        try:
            if not waiter.item.set_out(queued):
                return False
        except (Unavailable, Overloaded):
            return False
        except Exception as error:  # raised in the task that waits for the request
            line.queue.remove(waiter)
            turn.set_exception(error)
            return True
        line.queue.serve(waiter)
        num_workers = self._num_workers(waiter.item.request.model)
        line.moved(waiter.cost_s, asyncio.get_running_loop().time(), num_workers)
        turn.set_result(None)
        self._record_wait(waiter.item, queued)
        return True

    def _record_wait(self, item: WaitingRequest, queued: Queued) -> None:
        self._waited(queued.tenant, queued.waited_s)
        if telemetry.enabled():
            attributes = {
                "disagg.queue.priority": queued.priority,
                "disagg.queue.num_before": queued.num_before,
                "disagg.queue.predicted_s": queued.predicted_s,
            }
            ended_s = item.began_s + queued.waited_s
            traceparent = item.request.traceparent
            telemetry.record_span("queue", traceparent, item.began_s, ended_s, attributes)


def _full(max_nbytes: int, wait_s: float) -> Overloaded:
    return Overloaded(
        f"The admission queue is full ({max_nbytes} bytes, http.max_queue_nbytes).",
        retry_after_s=wait_s,
        reason="queue_full",
    )
