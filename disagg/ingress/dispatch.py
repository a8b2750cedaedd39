"""Runs a request on the workers, from its prompt to its last token, and reroutes it on failures.

1. Choose a route (`router/policy.py`), after a wait in the queue if workers are busy or away.
2. Optionally get a ticket for a cached prefix from another worker.
3. Prefill on one worker, which returns the first token and a ticket for the KV.
4. Decode on another worker, which pulls the KV that the ticket names. One worker may do both.

If a worker dies, or fails with an error that another worker may not have, the request is routed
again with the tokens so far. The client sees one stream without gaps or repeated tokens, and
exactly one end: a delta with a `finish_reason`, or a `DisaggError`.

Deltas go on where they arrive: a worker's link gives each to `put`, in the same turn of the event
loop, and the request's task only waits for the end. Time and randomness are arguments.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

import msgspec

from disagg import telemetry
from disagg.api.http.metrics import ApiMetrics
from disagg.errors import DisaggError, Overloaded, Unavailable, WorkerLost
from disagg.ingress.admission_queue import AdmissionQueue, Queued
from disagg.ingress.decisions import Decision, RecentRequests, WorkerVisit
from disagg.ingress.request_state import RequestState, Visit
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import (
    NO_STREAM,
    AnswerEnded,
    GenerateRequest,
    Prefetch,
    PutDelta,
    Start,
    TokenDelta,
)
from disagg.router.admission import limit_s
from disagg.router.fleet import Fleet, FleetView, Reservation
from disagg.router.load_report import Demand
from disagg.router.policy import ChooseRoute, choose_decode, choose_route
from disagg.router.route import Candidate, Route, describe
from disagg.router.worker_view import RequestLoad

PREFIX_PULL_PATIENCE_S = 1.0  # longest wait for a ticket of a prefix, before it is computed


class Workers(Protocol):
    """The workers of all pools, by id: `links.fleet_links.FleetLinks`, or the simulator's."""

    async def run(self, worker_id: str, start: Start, put: PutDelta, *, timeout_s: float) -> None:
        """Run a request on a worker. Returns after its last delta. Cancelling it cancels it there.

        Raises:
            WorkerLost: the link ended, after `put` got all deltas that arrived.
            DeadlineExceeded: `timeout_s` passed before the last delta.
        """
        ...

    def release(self, ticket: KVTicket) -> None:
        """Tell the ticket's source to free the blocks, because the ticket will not be used."""
        ...

    def introduce(self, worker_id: str, source_id: str) -> None:
        """Tell a worker how to reach `source_id`, before it gets a ticket of that worker."""
        ...

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        """Make a worker pull the finished blocks of a prompt that it will get later."""
        ...


class Dispatcher:
    """Generates answers on the workers of a fleet.

    Args:
        now: returns Unix time in seconds.
        max_moves: how often a request may be rerouted before its error is final.
        patience_s: how long a request that lost its worker waits for another one. After its first
            token it waits until its deadline, because the client cannot request the rest of the
            answer. A new request without a worker is refused at once.
        metrics: counts reroutes, prefix pulls, places of prefill and time by stage.
        admission_queue: decides which requests wait; None sends every request to a worker at once.
        wakes: models that may be scaled to zero. Their requests wait for a worker until their
            deadline, because a request makes the autoscaler start one.

    Attributes:
        demand: counters of all requests that arrived here, for the autoscaler.
    """

    def __init__(
        self,
        workers: Workers,
        fleet: Fleet,
        *,
        now: Callable[[], float],
        rng: random.Random,
        max_moves: int = 5,
        patience_s: float = 30.0,
        max_num_decisions: int = 1024,
        metrics: ApiMetrics | None = None,
        choose: ChooseRoute = choose_route,
        admission_queue: AdmissionQueue | None = None,
        wakes: Collection[str] = (),
    ) -> None:
        self.demand = Demand()
        self._workers = workers
        self._fleet = fleet
        self._now = now
        self._rng = rng
        self._max_moves = max_moves
        self._patience_s = patience_s
        self._metrics = metrics or ApiMetrics()
        self._choose_route = choose
        self._queue = admission_queue or AdmissionQueue(fleet, now=now, is_fair=False)
        self._wakes = wakes
        self._decisions: RecentRequests[tuple[Decision, ...]] = RecentRequests(max_num_decisions)

    def decision(self, request_id: str) -> tuple[Decision, ...]:
        """The routing decisions of a recent request, oldest first; empty for older requests."""
        return self._decisions.get(request_id) or ()

    async def generate(self, request: GenerateRequest, put: PutDelta) -> None:
        """Pass the answer to `put`. Returns after its last delta.

        Cancelling it, and an exception of `put`, cancels the request on its workers. Every delta
        except the last has new tokens; only the last has a `finish_reason`. The
        `num_cached_tokens` of the first delta counts prompt tokens that came from a cache. Ignore
        `stream_id`.

        Raises:
            Unavailable: no worker of the model accepts requests.
            Overloaded: the request was refused; see `retry_after_s`.
            DeadlineExceeded: the request's deadline passed.
            DisaggError: a worker failed with an error that rerouting would not avoid.
        """
        state = RequestState(request)
        began_s = self._now()
        usual = self._fleet.answers.usual(request.model)
        self.demand.arrived(request.model, len(request.token_ids), usual)
        try:
            while not state.is_finished:
                if not state.visits:
                    is_new = not state.worker_id
                    await self._choose(state)
                    if is_new:
                        self._metrics.observe_stage(state.model, "queue", self._now() - began_s)
                if state.prefix_source is not None:
                    await self._pull_prefix(state, state.prefix_source)
                try:
                    await self._visit(state, put)
                except DisaggError as error:
                    if not error.retryable or state.num_moves >= self._max_moves:
                        raise
                    self._cancel_visits(state)
                    state.move(error)
                    self._metrics.of("request_moves", state.model).inc()
        finally:
            if state.is_finished:
                self._fleet.answers.observe(state.model, state.num_output_tokens)
            self._cancel_visits(state)
            if state.ticket is not None:
                self._workers.release(state.ticket)
            if state.charge is not None:
                self._queue.end(state.charge, state.num_output_tokens)

    async def _choose(self, state: RequestState) -> None:
        """Choose and reserve a route, after waiting in the admission queue or for a worker."""
        has_begun = state.num_output_tokens > 0
        may_wake = state.model in self._wakes
        waits_until = math.inf if has_begun or may_wake else self._now() + self._patience_s
        waits_until = min(waits_until, state.request.deadline_unix_s)
        has_waited = False
        try:
            while True:
                try:
                    route = self._route(state)
                    if has_waited and not state.worker_id:
                        # The next one looks once this one is reserved or queued.
                        asyncio.get_running_loop().call_soon(self._queue.wake, state.model)
                    await self._take_turn(state, route)
                    return
                except Unavailable:
                    if state.is_turned_away:
                        raise Overloaded(
                            "All workers are at their limit of requests; try again shortly.",
                            retry_after_s=state.wait_s,
                        ) from None
                    if not (state.worker_id or may_wake) or self._now() >= waits_until:
                        raise
                state.excluded.clear()
                left_s = max(0.0, waits_until - self._now())
                if self._queue.has_worker(state.model):  # a worker that refused this request
                    await asyncio.sleep(min(state.pause_s, left_s))
                else:
                    await self._queue.wait_for_worker(state.model, left_s, again=has_waited)
                    has_waited = True
        finally:
            if has_waited:
                self._queue.wake(state.model)

    async def _take_turn(self, state: RequestState, route: Route) -> None:
        """Reserve the route now, or wait in the admission queue first. Raises `Overloaded`."""
        request, queue = state.request, self._queue
        if state.worker_id or not queue.is_fair:
            self._set_out(state, route)
            return
        charge = queue.charge(request, route)
        if queue.goes_at_once(request, route):
            queue.pass_by(charge)
            state.charge = charge
            self._set_out(state, route)
            return

        def set_out(queued: Queued) -> bool:
            latest = queue.with_room(request.model, self._decide(state, None))
            if latest is None:
                return False
            state.charge = charge
            self._set_out(state, latest, queued)
            return True

        await queue.wait(request, route.chosen, charge, set_out)

    def _route(self, state: RequestState) -> Route:
        request = state.grow(self._block_size(state))
        # A request that was admitted once is not refused later when it is rerouted.
        is_new = not state.worker_id
        ttft_slo_s = request.ttft_slo_s or math.inf
        with telemetry.span("route", request.traceparent) as span:
            route = self._decide(state, ttft_slo_s if is_new else None)
            if telemetry.enabled():
                describe(route, state.because, span)
        return route

    def _decide(self, state: RequestState, ttft_slo_s: float | None) -> Route:
        """A route for the tokens so far, which may be refused as too slow for `ttft_slo_s`."""
        request, ticket, view = state.request, state.ticket, self._fleet.view()
        context = view, self._fleet.index, self._now(), self._rng, state.excluded
        if ticket is not None:
            is_prefix = ticket.num_tokens < state.num_tokens - 1  # else it is of a finished prefill
            if not is_prefix and _is_alive(ticket, view):
                route = choose_decode(request, ticket.source_id, ticket.num_tokens, *context)
                if route.decode != ticket.source_id:  # otherwise the source has the KV cached
                    return route
            self._workers.release(ticket)
            state.ticket = None
        return self._choose_route(request, *context, ttft_slo_s)

    def _set_out(self, state: RequestState, route: Route, queued: Queued | None = None) -> None:
        """Reserve a route. There must be no await between its choice and this call."""
        now = self._now()
        state.wait_s = min(candidate.wait_s for candidate in route.candidates)
        if state.worker_id:
            state.awaited = None
        else:
            state.awaited = self._begin_wait(now, route.chosen, queued)
            self.demand.hit(state.model, route.num_cached_tokens)
        state.visited = []
        decision = Decision(
            now,
            route,
            state.num_tokens,
            state.because,
            state.request.tenant,
            queued,
            state.model,
            state.visited,
        )
        # Clients may reuse an id.
        earlier = self.decision(state.request.request_id)[-self._max_moves :]
        self._decisions.put(state.request.request_id, (*earlier, decision))
        state.prefix_source = route.prefix_source
        if state.ticket is None:  # otherwise the prompt is already computed
            place = "local" if route.prefill is None else "remote"
            reason = "moved" if state.num_moves else route.cause
            self._metrics.of("prefills", state.model, place, reason).inc()
        state.visits.extend(self._reserve(state, route))

    def _begin_wait(
        self, now: float, route: Candidate, queued: Queued | None
    ) -> tuple[float, Candidate] | None:
        """When the wait for the first token began, and the route with its predicted times.

        None if requests wait in the admission queue and this one did not: it teaches nothing.
        """
        if not self._queue.is_fair:
            return now, route
        if queued is None:
            return None
        since = now - queued.waited_s
        return since, msgspec.structs.replace(
            route,
            wait_s=route.wait_s + queued.predicted_s,
            first_token_s=route.first_token_s + queued.predicted_s,
        )

    def _reserve(self, state: RequestState, route: Route) -> tuple[Visit, ...]:
        """Count the request on its workers, in the order in which it visits them."""
        num_tokens = state.num_tokens
        num_new = num_tokens - route.num_cached_tokens
        source = route.prefill if state.ticket is None else state.ticket.source_id
        if source is not None:
            self._workers.introduce(route.decode, source)  # so that it connects during the prefill
        if route.prefill is None:
            return (Visit(self._fleet.reserve(route.decode, RequestLoad(num_new, 1, num_tokens))),)
        return (
            Visit(self._fleet.reserve(route.prefill, RequestLoad(num_new)), hand_over=True),
            Visit(self._fleet.reserve(route.decode, RequestLoad(0, 1, num_tokens))),
        )

    def _block_size(self, state: RequestState) -> int | None:
        """The block size of block hashes. A worker with another block size hashes again."""
        if state.request.block_size:
            return state.request.block_size
        workers = self._fleet.view().workers.values()
        return next((w.record.block_size for w in workers if w.record.model == state.model), None)

    async def _pull_prefix(self, state: RequestState, source: str) -> None:
        """Get a ticket for the prefix that `source` has cached. On failure it is computed."""
        state.prefix_source = None
        block_size = self._block_size(state)
        if block_size is None:
            return
        self._workers.introduce(state.visits[0].reservation.worker_id, source)
        request, began_s = state.prefix_request(block_size), self._now()
        timeout_s = min(state.request.deadline_unix_s - began_s, PREFIX_PULL_PATIENCE_S)

        def take(delta: TokenDelta) -> None:
            state.ticket = delta.ticket  # None if the delta has an error

        with suppress(DisaggError):  # for example, it ends at once if the worker is gone
            start = Start(NO_STREAM, request, hand_over=True)
            await self._workers.run(source, start, take, timeout_s=timeout_s)
        outcome = "refused" if state.ticket is None else "granted"
        self._metrics.of("prefix_pulls", state.model, outcome).inc()
        self._metrics.observe_stage(state.model, "prefix_pull", self._now() - began_s)

    async def _visit(self, state: RequestState, put: PutDelta) -> None:
        """Run the request on the next worker of the route. Raises the worker's error."""
        reservation, hand_over = state.visits.popleft()
        state.worker_id = worker_id = reservation.worker_id
        has_begun = has_ended = False
        visit, num_before = WorkerVisit(worker_id, self._now()), state.num_output_tokens
        state.visited.append(visit)

        def take(delta: TokenDelta) -> None:
            nonlocal has_begun, has_ended
            has_ended = delta.is_last
            if not has_begun:
                has_begun = bool(delta.token_ids)
                if has_begun:
                    visit.begin(self._now(), delta)
                self._begin(state, reservation, delta)
            shown = state.take(delta)
            if shown is not None:
                try:
                    put(shown)
                except AnswerEnded:
                    state.is_finished = True
                    raise
            if delta.error is not None:
                raise delta.error.to_error()

        try:
            request = state.grow(self._block_size(state))
            timeout_s = request.deadline_unix_s - self._now()
            self._fleet.sent(reservation)
            start = Start(NO_STREAM, request, hand_over, state.ticket)
            await self._workers.run(worker_id, start, take, timeout_s=timeout_s)
            if not has_ended:
                raise WorkerLost(f"Worker {worker_id} ended a stream before its last delta.")
        finally:
            visit.ended_unix_s = self._now()
            visit.num_tokens = state.num_output_tokens - num_before
            self._fleet.release(reservation)

    def _begin(self, state: RequestState, reservation: Reservation, delta: TokenDelta) -> None:
        """Handle a worker's deltas up to and including the one with its first token."""
        self._fleet.release(reservation)  # the worker's own reports include the request by now
        if delta.early_ticket is not None:
            self._prefetch(state, delta.early_ticket)
        if state.awaited is not None and delta.token_ids:
            self._learn_error(state, *state.awaited)
        if delta.times is not None:
            self._metrics.observe_worker(state.model, delta.times)

    def _prefetch(self, state: RequestState, ticket: KVTicket) -> None:
        """Let the decode worker pull finished blocks while prefill computes the rest."""
        if state.visits:
            next_id = state.visits[0].reservation.worker_id
            self._workers.prefetch(next_id, state.prefetch(ticket))

    def _learn_error(self, state: RequestState, since: float, route: Candidate) -> None:
        """Compare the TTFT with its prediction, which only requests that waited can correct."""
        state.awaited = None
        slo_s, left_s = state.request.ttft_slo_s or math.inf, state.request.deadline_unix_s - since
        learned, took_s = self._fleet.first_tokens[state.model], self._now() - since
        learned.observe(route.own_s + route.wait_s, took_s, limit_s(route, slo_s, left_s))

    def _cancel_visits(self, state: RequestState) -> None:
        for visit in state.visits:
            self._fleet.release(visit.reservation)
        state.visits.clear()


def _is_alive(ticket: KVTicket, view: FleetView) -> bool:
    source = view.workers.get(ticket.source_id)
    return source is not None and source.record.epoch == ticket.epoch
