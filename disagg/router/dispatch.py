"""Carries a request from its prompt to its last token, whatever happens to workers on the way.

The way of a request: choose a route; prefill on one worker, which hands over its first token and a
ticket for the KV; go on with both on a decode worker. Or all on one worker. Wherever a worker is
lost or answers with an error that another one may not have, the same move follows: route again
with the tokens so far. The client sees one stream without a gap or a repeated token, and either
exactly one last delta with a `finish_reason`, or a `DisaggError`.

Knows workers only as `Workers`; time and randomness are given.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from disagg import telemetry
from disagg.blocks import hash_block
from disagg.errors import DisaggError, EngineFailed, Overloaded, Unavailable, WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, TokenDelta
from disagg.router.fleet import Fleet, FleetView, Load, Reservation
from disagg.router.policy import choose_decode, choose_route
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Route

PAUSE_S = 0.05  # between looks at a fleet that has no worker for us


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


class ChooseRoute(Protocol):
    """How a request that is nowhere yet finds its way. `policy.choose_route` is one, and those of
    `baselines` are others, to compare it with."""

    def __call__(
        self,
        request: GenerateRequest,
        fleet: FleetView,
        index: PrefixIndex,
        now: float,
        rng: random.Random,
        exclude: Collection[str] = (),
        ttft_slo_s: float | None = None,
    ) -> Route: ...


class Decision(msgspec.Struct, frozen=True):
    """One routing decision, for traces and `GET /debug/requests/{id}`."""

    unix_s: float
    route: Route
    num_tokens: int  # prompt and output so far
    because: str  # "" for the first, then the error that made the request move


class Dispatcher:
    """Generates answers on the workers of a fleet.

    Args:
        now: Unix time in seconds.
        max_moves: how often a request may be routed again before its error is final.
        patience_s: how long a request that had a worker waits for another one to appear. A
            request that finds none at first is refused at once.
        ttft_slo_s: by model; a request whose first token would come later is refused
            (`admission.in_time`).
        moved: told the model of each request that is routed again.
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
        choose: ChooseRoute = choose_route,
    ) -> None:
        self._workers = workers
        self._fleet = fleet
        self._now = now
        self._rng = rng
        self._max_moves = max_moves
        self._patience_s = patience_s
        self._max_num_decisions = max_num_decisions
        self._ttft_slo_s = ttft_slo_s
        self._moved = moved
        self._choose_route = choose
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
        journey = _Journey(request)
        try:
            while not journey.is_finished:
                if not journey.visits:
                    journey.visits.extend(await self._choose(journey))
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

    async def _visit(self, journey: _Journey) -> AsyncGenerator[TokenDelta, None]:
        """What the route's next worker says. Raises its error unless the answer ends there."""
        reservation, hand_over = journey.visits.popleft()
        journey.worker_id = worker_id = reservation.worker_id
        try:
            stream = self._workers.stream(
                worker_id,
                journey.request(self._block_size(journey.model)),
                timeout_s=journey.deadline_unix_s - self._now(),
                hand_over=hand_over,
                ticket=None if hand_over else journey.ticket,
            )
            self._fleet.sent(reservation)
            async with aclosing(stream):
                is_silent = True
                async for delta in stream:
                    if is_silent:
                        is_silent = False
                        self._fleet.release(reservation)  # its own reports show it from here on
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

    def _learn_delay(self, journey: _Journey, since: float, way: Candidate) -> None:
        """The first token came. Where nobody waits its time says nothing about queues."""
        journey.awaited = None
        if way.wait_s > way.own_s:
            took_s = self._now() - since
            self._fleet.delays.observe(journey.model, way.first_token_s, took_s)

    def _cancel_visits(self, journey: _Journey) -> None:
        for visit in journey.visits:
            self._fleet.release(visit.reservation)
        journey.visits.clear()

    async def _choose(self, journey: _Journey) -> tuple[_Visit, ...]:
        """Choose and reserve in one step, waiting for a worker where that makes sense."""
        waits_until = self._now() + self._patience_s
        while True:
            try:
                return self._reserve(journey, self._route(journey))
            except Unavailable:
                if journey.is_turned_away:
                    raise Overloaded(
                        "All workers are full; try again shortly.", retry_after_s=journey.wait_s
                    ) from None
                if not journey.worker_id or self._now() >= waits_until:
                    raise
            journey.excluded.clear()
            left_s = journey.deadline_unix_s - self._now()
            await asyncio.sleep(max(0.0, min(PAUSE_S, left_s)))

    def _route(self, journey: _Journey) -> Route:
        view, now = self._fleet.view(), self._now()
        request = journey.request(self._block_size(journey.model))
        with telemetry.span("route", request.traceparent) as span:
            route = self._decide(journey, request, view, now)
            if telemetry.enabled():
                _describe(route, journey.because, span)
        journey.wait_s = min(candidate.wait_s for candidate in route.candidates)
        journey.awaited = None if journey.worker_id else (now, route.chosen)
        self._remember(
            request.request_id, Decision(now, route, len(request.token_ids), journey.because)
        )
        return route

    def _decide(
        self, journey: _Journey, request: GenerateRequest, view: FleetView, now: float
    ) -> Route:
        index, rng, excluded = self._fleet.index, self._rng, journey.excluded
        ticket = journey.ticket
        if ticket is not None and _is_alive(ticket, view):
            return choose_decode(
                request, ticket.source_id, ticket.num_tokens, view, index, now, rng, excluded
            )
        journey.ticket = None
        # Who has been taken in is not turned away again because the way got longer.
        is_new = not journey.worker_id
        ttft_slo_s = self._ttft_slo_s.get(journey.model, math.inf) if is_new else None
        return self._choose_route(request, view, index, now, rng, excluded, ttft_slo_s)

    def _reserve(self, journey: _Journey, route: Route) -> tuple[_Visit, ...]:
        """Claims in the order of the visits."""
        num_tokens = journey.num_tokens
        num_new = num_tokens - route.num_cached_tokens
        if route.prefill is None:
            return (_Visit(self._fleet.reserve(route.decode, Load(num_new, 1, num_tokens))),)
        return (
            _Visit(self._fleet.reserve(route.prefill, Load(num_new)), hand_over=True),
            _Visit(self._fleet.reserve(route.decode, Load(0, 1, num_tokens))),
        )

    def _block_size(self, model: str) -> int | None:
        """The same for all workers of a model; None while there are none."""
        workers = self._fleet.view().workers.values()
        return next((w.record.block_size for w in workers if w.record.model == model), None)

    def _remember(self, request_id: str, decision: Decision) -> None:
        decisions = self._decisions.setdefault(request_id, [])
        decisions.append(decision)
        del decisions[: -self._max_moves - 1]  # ids come from clients, who may repeat them
        self._decisions.move_to_end(request_id)
        while len(self._decisions) > self._max_num_decisions:
            self._decisions.popitem(last=False)


class _Visit(NamedTuple):
    """A worker on a request's way; it keeps the sequence to its end unless it is to hand over."""

    reservation: Reservation
    hand_over: bool = False


class _Journey:
    """How far a request has come."""

    def __init__(self, request: GenerateRequest) -> None:
        self.visits: deque[_Visit] = deque()  # what is left of the route
        self.ticket: KVTicket | None = None  # KV that waits for the next decode worker
        self.excluded: set[str] = set()  # workers that failed this request
        self.num_moves = 0
        self.because = ""
        self.is_finished = False
        self.worker_id = ""  # where it is
        self.wait_s = 0.0  # predicted when its route was chosen
        self.awaited: tuple[float, Candidate] | None = None  # its first token: since when, and how
        self.is_turned_away = False  # all workers so far had no room for it to begin
        self._request = request
        self._generated: list[int] = []  # beyond `_request.token_ids`
        self._is_first = True
        self._had_engine_failure = False

    @property
    def model(self) -> str:
        return self._request.model

    @property
    def deadline_unix_s(self) -> float:
        return self._request.deadline_unix_s

    @property
    def num_tokens(self) -> int:
        return len(self._request.token_ids) + len(self._generated)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self._request.num_prompt_tokens

    def request(self, block_size: int | None) -> GenerateRequest:
        """What to ask the next worker: everything so far, and the names of its full blocks."""
        if self._generated and block_size is not None:
            self._request = grown(self._request, self._generated, block_size)
            self._generated = []
        return self._request

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """Note what a worker said. Returns what the client gets of it."""
        self._generated += delta.token_ids
        self.is_finished = delta.finish_reason is not None
        if delta.ticket is not None:
            self.ticket = delta.ticket
        elif delta.token_ids:
            self.ticket = None  # used up by the worker that generates from it
        if not delta.token_ids and not self.is_finished:
            return None
        num_cached_tokens = delta.num_cached_tokens if self._is_first else 0
        self._is_first = False
        is_plain = delta.ticket is None and delta.error is None
        if is_plain and num_cached_tokens == delta.num_cached_tokens:
            return delta
        return TokenDelta(
            delta.stream_id,
            delta.token_ids,
            delta.finish_reason,
            delta.logprobs,
            num_cached_tokens,
        )

    def may_move(self, error: DisaggError) -> bool:
        """An engine that failed takes all its requests with it, so one failure says nothing about
        this one. A second makes it the suspect, and it must not go on to break a third."""
        if isinstance(error, EngineFailed):
            return not self._had_engine_failure
        return error.retryable

    def move(self, error: DisaggError) -> None:
        self._had_engine_failure |= isinstance(error, EngineFailed)
        self.num_moves += 1
        self.is_turned_away = isinstance(error, Overloaded) and not self.num_output_tokens
        self.because = f"{error.code}: {error.message}"
        self.excluded.add(self.worker_id)


def _describe(route: Route, because: str, span: telemetry.Span) -> None:
    """The decision with its candidates, as attributes of its span."""
    span.set("disagg.route.prefill", route.prefill or "")
    span.set("disagg.route.decode", route.decode)
    span.set("disagg.route.predicted_s", route.predicted_s)
    span.set("disagg.route.num_cached_tokens", route.num_cached_tokens)
    span.set("disagg.route.reason", route.reason)
    span.set("disagg.route.moved_because", because)
    span.set(
        "disagg.route.candidates",
        [
            f"{each.prefill or '-'} > {each.decode}: {each.total_s:.6f} s"
            for each in route.candidates
        ],
    )


def grown(request: GenerateRequest, token_ids: list[int], block_size: int) -> GenerateRequest:
    """`request` with more tokens after it, and the names of the blocks that these fill."""
    tokens = (*request.token_ids, *token_ids)
    hashes = list(request.block_hashes)
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else request.hash_root
        hashes.append(hash_block(parent, tokens[start : start + block_size]))
    return msgspec.structs.replace(request, token_ids=tokens, block_hashes=tuple(hashes))


def _is_alive(ticket: KVTicket, view: FleetView) -> bool:
    source = view.workers.get(ticket.source_id)
    return source is not None and source.record.epoch == ticket.epoch
