"""Carries a request from its prompt to its last token, whatever happens to workers on the way.

The way of a request: choose a route; prefill on one worker, which hands over its first token and a
ticket for the KV; go on with both on a decode worker. Or all on one worker. Before the first of
them, a worker that has the beginning of the prompt may lend it: a ticket too. Wherever a worker is
lost or answers with an error that another one may not have, the same move follows: route again
with the tokens so far. The client sees one stream without a gap or a repeated token, and either
exactly one last delta with a `finish_reason`, or a `DisaggError`.

Knows workers only as `Workers`; time and randomness are given.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import Protocol

import msgspec

from disagg import telemetry
from disagg.errors import DisaggError, Overloaded, Unavailable, WorkerLost
from disagg.ingress.admission_queue import Queued, Turns
from disagg.ingress.awaiting import AwaitingWorkers
from disagg.ingress.request_state import Journey, Visit
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, Prefetch, TokenDelta
from disagg.router.demand import Demand
from disagg.router.fleet import Fleet, FleetView, Load
from disagg.router.policy import ChooseRoute, choose_decode, choose_route
from disagg.router.route import Candidate, Route, describe

PAUSE_S = 0.05  # before workers that refused a request are asked once more
LOAN_PATIENCE_S = 1.0  # for a ticket; a lender that steps longer than that is not worth asking


class Workers(Protocol):
    """Streams by worker id. `links.fleet_links.FleetLinks` is one."""

    def stream(
        self,
        worker_id: str,
        request: GenerateRequest,
        *,
        timeout_s: float,
        hand_over: bool = False,
        ticket: KVTicket | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Run the request there; closing the iterator cancels it.

        Raises, here or while iterating:
            WorkerLost: what had arrived was handed over.
            DeadlineExceeded: `timeout_s` passed before the last delta.
        """
        ...

    def release(self, ticket: KVTicket) -> None:
        """Nobody will use `ticket`."""
        ...

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        """A request will come: have the worker pull what is ready of it."""
        ...


class Decision(msgspec.Struct, frozen=True):
    """One routing decision, for traces and `GET /debug/requests/{id}`."""

    unix_s: float
    route: Route
    num_tokens: int  # prompt and output so far
    because: str  # "" for the first, then the error that made the request move
    queued: Queued | None = None  # how it waited in the ingress before; None: not at all


class Dispatcher:
    """Generates answers on the workers of a fleet.

    Args:
        now: Unix time in seconds.
        max_moves: how often a request may be routed again before its error is final.
        patience_s: how long a request that had a worker waits for another one to appear. One
            whose answer has begun waits until its deadline, since its client cannot ask again for
            the rest of it; one that finds none at first is refused at once.
        ttft_slo_s: by model; a request whose first token would come later is refused
            (`admission.in_time`).
        moved: told the model of each request that is routed again.
        borrowed: told the model of each prefix that was to be borrowed, and whether it was.
        turns: who may go to the workers, and who waits; None: whoever comes goes.
        wakes: models whose pools may be empty: a request waits for a worker until its deadline,
            because its coming is what starts one.

    Attributes:
        demand: what was asked here so far.
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
        ttft_slo_s: Mapping[str, float] = MappingProxyType({}),
        moved: Callable[[str], None] = lambda model: None,
        borrowed: Callable[[str, bool], None] = lambda model, is_lent: None,
        choose: ChooseRoute = choose_route,
        turns: Turns | None = None,
        wakes: Collection[str] = (),
    ) -> None:
        self.demand = Demand()
        self._workers = workers
        self._fleet = fleet
        self._now = now
        self._rng = rng
        self._max_moves = max_moves
        self._patience_s = patience_s
        self._max_num_decisions = max_num_decisions
        self._ttft_slo_s = ttft_slo_s
        self._moved = moved
        self._borrowed = borrowed
        self._choose_route = choose
        self._turns = turns
        self._wakes = wakes
        self._awaiting = AwaitingWorkers(fleet)
        self._decisions: OrderedDict[str, list[Decision]] = OrderedDict()

    def decision(self, request_id: str) -> tuple[Decision, ...]:
        """The routing decisions of a recent request, oldest first; empty when forgotten."""
        return tuple(self._decisions.get(request_id, ()))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """The answer. Closing the iterator cancels the request wherever it is.

        Every delta but the last has new tokens; only the last has a `finish_reason`. The first
        one's `num_cached_tokens` counts prompt tokens that were not computed anywhere. Stream ids
        mean nothing.

        Raises:
            Unavailable, Overloaded, DeadlineExceeded: as their names say.
            DisaggError: what a worker answered, when it was final.
        """
        journey = Journey(request)
        usual = self._fleet.answers.usual(request.model)
        self.demand.arrived(request.model, len(request.token_ids), usual)
        try:
            while not journey.is_finished:
                if not journey.visits:
                    await self._choose(journey)
                if journey.lender is not None:
                    await self._borrow(journey, journey.lender)
                try:
                    async with aclosing(self._visit(journey)) as deltas:
                        async for delta in deltas:
                            yield delta
                except DisaggError as error:
                    if not journey.may_move(error) or journey.num_moves >= self._max_moves:
                        raise
                    self._cancel_visits(journey)
                    journey.move(error)
                    self._moved(journey.model)
            self._fleet.answers.observe(journey.model, journey.num_output_tokens)
        finally:
            self._cancel_visits(journey)
            if journey.ticket is not None:
                self._workers.release(journey.ticket)
            if self._turns is not None and journey.charge is not None:
                self._turns.end(journey.charge, journey.num_output_tokens)

    async def _visit(self, journey: Journey) -> AsyncGenerator[TokenDelta, None]:
        """What the route's next worker says. Raises its error unless the answer ends there."""
        reservation, hand_over = journey.visits.popleft()
        journey.worker_id = worker_id = reservation.worker_id
        try:
            stream = self._workers.stream(
                worker_id,
                journey.request(self._block_size(journey)),
                timeout_s=journey.deadline_unix_s - self._now(),
                hand_over=hand_over,
                ticket=journey.ticket,
            )
            self._fleet.sent(reservation)
            async with aclosing(stream):
                is_silent = True
                async for delta in stream:
                    if is_silent:
                        is_silent = False
                        self._fleet.release(reservation)  # its own reports show it from here on
                    if delta.early_ticket is not None:
                        self._prefetch(journey, delta.early_ticket)
                    if journey.awaited is not None and delta.token_ids:
                        self._learn_delay(journey, *journey.awaited)
                    shown = journey.take(delta)
                    if shown is not None:
                        yield shown
                    if delta.error is not None:
                        raise delta.error.to_error()
                    if delta.is_last:
                        return
        finally:
            self._fleet.release(reservation)
        raise WorkerLost(f"Worker {worker_id} ended a stream early.")

    def _prefetch(self, journey: Journey, ticket: KVTicket) -> None:
        """Let who goes on with the request pull what is ready while the rest is computed."""
        if journey.visits:
            next_id = journey.visits[0].reservation.worker_id
            self._workers.prefetch(next_id, journey.prefetch(ticket))

    async def _borrow(self, journey: Journey, lender: str) -> None:
        """Get a ticket for what the lender has cached. Without one, all of it is computed."""
        journey.lender = None
        block_size = self._block_size(journey)
        if block_size is None:
            return
        loan = journey.loan(block_size)
        timeout_s = min(journey.deadline_unix_s - self._now(), LOAN_PATIENCE_S)
        with suppress(DisaggError):  # of a lender that has left, too: it is heard of at once
            stream = self._workers.stream(lender, loan, timeout_s=timeout_s, hand_over=True)
            async with aclosing(stream):
                async for delta in stream:
                    journey.ticket = delta.ticket  # None beside an error
                    break
        self._borrowed(journey.model, journey.ticket is not None)

    def _learn_delay(self, journey: Journey, since: float, way: Candidate) -> None:
        """The first token came. Where nobody waits its time says nothing about queues."""
        journey.awaited = None
        if way.wait_s > way.own_s:
            took_s = self._now() - since
            self._fleet.delays.observe(journey.model, way.first_token_s, took_s)

    def _cancel_visits(self, journey: Journey) -> None:
        for visit in journey.visits:
            self._fleet.release(visit.reservation)
        journey.visits.clear()

    async def _choose(self, journey: Journey) -> None:
        """Choose and reserve in one step, waiting for a turn or a worker where that makes sense."""
        has_begun = journey.num_output_tokens > 0
        may_wake = journey.model in self._wakes
        waits_until = math.inf if has_begun or may_wake else self._now() + self._patience_s
        waits_until = min(waits_until, journey.deadline_unix_s)
        has_waited = False
        try:
            while True:
                try:
                    route = self._route(journey)
                    if self._turns is not None and not journey.worker_id:
                        if has_waited:
                            self._let_next_look(journey.model)
                        await self._take_turn(self._turns, journey, route)
                    else:
                        self._set_out(journey, route)
                    return
                except Unavailable:
                    if journey.is_turned_away:
                        raise Overloaded(
                            "All workers are full; try again shortly.",
                            retry_after_s=journey.wait_s,
                        ) from None
                    if not (journey.worker_id or may_wake) or self._now() >= waits_until:
                        raise
                journey.excluded.clear()
                left_s = max(0.0, waits_until - self._now())
                if self._awaiting.has_worker(journey.model):  # it refused this request
                    await asyncio.sleep(min(PAUSE_S, left_s))
                else:
                    await self._awaiting.wait(journey.model, left_s, again=has_waited)
                    has_waited = True
        finally:
            if has_waited:
                self._awaiting.wake(journey.model)

    def _let_next_look(self, model: str) -> None:
        """As soon as the one that looks now has gone on, or joined the queue."""
        asyncio.get_running_loop().call_soon(self._awaiting.wake, model)

    async def _take_turn(self, turns: Turns, journey: Journey, route: Route) -> None:
        """Set out when that is fair. Raises `Overloaded`."""
        request = journey.request(None)
        charge = turns.charge(request, route)
        if turns.goes_at_once(request, route):
            turns.passes_by(charge)
            journey.charge = charge
            self._set_out(journey, route)
            return

        def set_out(queued: Queued) -> bool:
            latest = turns.with_room(
                request.model,
                self._decide(journey, request, self._fleet.view(), self._now(), None),
            )
            if latest is None:
                return False
            journey.charge = charge
            self._set_out(journey, latest, queued)
            return True

        await turns.wait(request, route.chosen, charge, set_out)

    def _route(self, journey: Journey) -> Route:
        view, now = self._fleet.view(), self._now()
        request = journey.request(self._block_size(journey))
        # Who has been taken in is not turned away again because the way got longer.
        is_new = not journey.worker_id
        ttft_slo_s = self._ttft_slo_s.get(journey.model, math.inf) if is_new else None
        with telemetry.span("route", request.traceparent) as span:
            route = self._decide(journey, request, view, now, ttft_slo_s)
            if telemetry.enabled():
                describe(route, journey.because, span)
        return route

    def _set_out(self, journey: Journey, route: Route, queued: Queued | None = None) -> None:
        """Reserve a route that was chosen in this moment."""
        now = self._now()
        journey.wait_s = min(candidate.wait_s for candidate in route.candidates)
        if journey.worker_id:
            journey.awaited = None
        else:
            journey.awaited = self._awaited(now, route.chosen, queued)
            self.demand.hit(journey.model, route.num_cached_tokens)
        decision = Decision(now, route, journey.num_tokens, journey.because, queued)
        self._remember(journey.request_id, decision)
        journey.lender = route.lender
        journey.visits.extend(self._reserve(journey, route))

    def _awaited(
        self, now: float, way: Candidate, queued: Queued | None
    ) -> tuple[float, Candidate] | None:
        """What there is to learn from its first token: with turns only from who waited for one, as
        all others have so little before them that how late they are says nothing of long waits."""
        if self._turns is None:
            return now, way
        if queued is None:
            return None
        since = now - queued.waited_s
        return since, msgspec.structs.replace(
            way,
            wait_s=way.wait_s + queued.predicted_s,
            first_token_s=way.first_token_s + queued.predicted_s,
        )

    def _decide(
        self,
        journey: Journey,
        request: GenerateRequest,
        view: FleetView,
        now: float,
        ttft_slo_s: float | None,
    ) -> Route:
        index, rng, excluded = self._fleet.index, self._rng, journey.excluded
        ticket = journey.ticket
        if ticket is not None:
            is_loan = ticket.num_tokens < journey.num_tokens - 1  # it led to no token
            if not is_loan and _is_alive(ticket, view):
                return choose_decode(
                    request, ticket.source_id, ticket.num_tokens, view, index, now, rng, excluded
                )
            self._workers.release(ticket)
            journey.ticket = None
        return self._choose_route(request, view, index, now, rng, excluded, ttft_slo_s)

    def _reserve(self, journey: Journey, route: Route) -> tuple[Visit, ...]:
        """Claims in the order of the visits."""
        num_tokens = journey.num_tokens
        num_new = num_tokens - route.num_cached_tokens
        if route.prefill is None:
            return (Visit(self._fleet.reserve(route.decode, Load(num_new, 1, num_tokens))),)
        return (
            Visit(self._fleet.reserve(route.prefill, Load(num_new)), hand_over=True),
            Visit(self._fleet.reserve(route.decode, Load(0, 1, num_tokens))),
        )

    def _block_size(self, journey: Journey) -> int | None:
        """By which its blocks are named. Workers of another size name them anew for themselves."""
        if journey.block_size:
            return journey.block_size
        model = journey.model
        workers = self._fleet.view().workers.values()
        return next((w.record.block_size for w in workers if w.record.model == model), None)

    def _remember(self, request_id: str, decision: Decision) -> None:
        decisions = self._decisions.setdefault(request_id, [])
        decisions.append(decision)
        del decisions[: -self._max_moves - 1]  # ids come from clients, who may repeat them
        self._decisions.move_to_end(request_id)
        while len(self._decisions) > self._max_num_decisions:
            self._decisions.popitem(last=False)


def _is_alive(ticket: KVTicket, view: FleetView) -> bool:
    source = view.workers.get(ticket.source_id)
    return source is not None and source.record.epoch == ticket.epoch
