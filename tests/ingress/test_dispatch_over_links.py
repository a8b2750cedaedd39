"""Dispatcher, fleet and links together, over sockets, with engines that only count."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest

from disagg.api.running_job import RunningJob
from disagg.ingress.dispatch import Dispatcher
from disagg.kvtransfer.ticket import KVTicket
from disagg.links.fleet_links import FleetLinks
from disagg.links.server import LinkClosed, LinkId
from disagg.messages import Cancel, GenerateRequest, KVEvent, Start, TokenDelta
from disagg.router.fleet import Fleet
from disagg.router.output_length import USUAL_OUTPUT_TOKENS, OutputLengths
from tests.api.fakes import TOKENIZER, request_spec
from tests.deltas import answers
from tests.links.fakes import KEY, FakeWorker, fake_worker, until
from tests.router.fakes import held_by, make_record, make_request, make_status


class FakeEngine:
    """Steps all started requests of a fake worker; every token is its position."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.tickets: list[KVTicket | None] = []
        self._running: dict[tuple[LinkId, int], tuple[Start, int]] = {}
        self._num_received = 0
        worker.on_start = self._start

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _start(self, link_id: LinkId, start: Start) -> None:
        self.tickets.append(start.ticket)
        self._running[link_id, start.stream_id] = (start, len(start.request.token_ids))

    def step(self) -> None:
        for link_id, message in self.worker.received[self._num_received :]:
            if isinstance(message, Cancel):
                self._running.pop((link_id, message.stream_id), None)
            elif isinstance(message, LinkClosed):
                self._running = {k: v for k, v in self._running.items() if k[0] != link_id}
        self._num_received = len(self.worker.received)
        deltas: dict[LinkId, list[TokenDelta]] = {}
        events = []
        for (link_id, stream_id), (start, position) in list(self._running.items()):
            delta = self._delta(start, position)
            deltas.setdefault(link_id, []).append(delta)
            self._running[link_id, stream_id] = (start, position + 1)
            if delta.is_last:
                del self._running[link_id, stream_id]
                events.append(KVEvent("stored", start.request.block_hashes))
        num_running = len(self._running)
        self.worker.step(deltas, events, make_status(num_running=num_running))

    def _delta(self, start: Start, position: int) -> TokenDelta:
        request = start.request
        worker_id = self.worker.record.worker_id
        if start.is_prefix_request:
            num_tokens = 16 * len(request.block_hashes)
            ticket = KVTicket(request.request_id, worker_id, 1, "toy/bs16", num_tokens, (0,), (1,))
            return TokenDelta(start.stream_id, (), ticket=ticket)
        end = request.num_prompt_tokens + request.sampling.max_tokens
        if position + 1 == end:
            return TokenDelta(start.stream_id, (position,), "length")
        if not start.hand_over:
            return TokenDelta(start.stream_id, (position,))
        ticket = KVTicket(request.request_id, worker_id, 1, "toy/bs16", position, (0,), (1,))
        return TokenDelta(start.stream_id, (position,), ticket=ticket)


@asynccontextmanager
async def deployment(
    *worker_ids: str,
) -> AsyncIterator[tuple[Dispatcher, Fleet, dict[str, FakeEngine]]]:
    """Workers that step every millisecond, and an ingress that is linked to all of them."""
    async with AsyncExitStack() as stack:
        engines = {}
        for worker_id in worker_ids:
            worker = await stack.enter_async_context(fake_worker(make_record(worker_id, port=0)))
            engines[worker_id] = FakeEngine(worker)
        fleet, rng = Fleet(), random.Random(1)
        links = FleetLinks(key=KEY, ingress_id="ingress-0", observer=fleet, rng=rng)
        stack.push_async_callback(links.close)
        links.update([engine.worker.record for engine in engines.values()])
        await until(lambda: len(fleet.view().workers) == len(worker_ids))

        async def step_all() -> None:
            while True:
                await asyncio.sleep(0.001)
                for engine in engines.values():
                    engine.step()

        stepping = asyncio.create_task(step_all())
        stack.callback(stepping.cancel)
        yield Dispatcher(links, fleet, now=time.time, rng=rng), fleet, engines


async def answer(dispatcher: Dispatcher, request: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    await dispatcher.generate(request, lambda delta: tokens.extend(delta.token_ids))
    return tokens


async def test_a_prompt_goes_through_prefill_and_decode() -> None:
    async with deployment("p0", "d0") as (dispatcher, _, engines):
        request = make_request(2000, max_tokens=20)
        assert await answer(dispatcher, request) == list(range(2000, 2020))
        assert dispatcher.decision("request-0")[0].route.prefill == "p0"
        (ticket,) = engines["d0"].tickets
        assert ticket is not None
        assert (ticket.source_id, ticket.num_tokens) == ("p0", 2000)


async def test_a_cached_prompt_is_found_by_the_events_of_the_first() -> None:
    async with deployment("d0", "d1", "d2") as (dispatcher, fleet, _):
        for turn in range(5):
            request = make_request(1000, max_tokens=5, request_id=f"request-{turn}")
            assert await answer(dispatcher, request) == list(range(1000, 1005))
            await until(lambda: held_by(fleet.index, make_request(1000).block_hashes))
        chosen = {dispatcher.decision(f"request-{turn}")[0].route.decode for turn in range(5)}
        assert len(chosen) == 1
        assert dispatcher.decision("request-4")[0].route.num_cached_tokens == 992


async def test_many_streams_outlive_a_worker() -> None:
    async with deployment("p0", "d0", "d1", "d2") as (dispatcher, fleet, engines):
        requests = [
            make_request(500 + i, max_tokens=150, request_id=f"request-{i}") for i in range(24)
        ]
        tasks = [asyncio.create_task(answer(dispatcher, request)) for request in requests]
        await until(lambda: all(engines[f"d{i}"].num_running > 3 for i in range(3)))
        for link in list(engines["d1"].worker.server._links.values()):
            link.abort()
        await engines["d1"].worker.server.close()
        for i, task in enumerate(tasks):
            assert await task == list(range(500 + i, 650 + i))
        assert "d1" not in fleet.view().workers
        moved = [i for i in range(24) if len(dispatcher.decision(f"request-{i}")) == 2]
        assert moved
        await until(lambda: sum(engine.num_running for engine in engines.values()) == 0)


async def test_a_client_that_leaves_stops_its_worker() -> None:
    async with deployment("d0") as (dispatcher, fleet, engines):
        request = make_request(100, max_tokens=1_000_000)
        async with aclosing(answers(dispatcher, request)) as deltas:
            await anext(deltas)
            assert engines["d0"].num_running == 1
        await until(lambda: engines["d0"].num_running == 0)
        assert fleet.answers.usual("toy") == USUAL_OUTPUT_TOKENS


@pytest.mark.parametrize(("stops", "num_tokens"), [((), 20), (("b",), 4)])
async def test_the_length_of_an_answer_is_learned_once(
    stops: tuple[str, ...], num_tokens: int
) -> None:
    async with deployment("d0") as (dispatcher, fleet, _):
        [b] = TOKENIZER.encode("b", add_special_tokens=False)
        request = make_request(b - 3, max_tokens=20)  # it is answered with b-3, b-2, ...
        spec = request_spec(request.sampling, stops=stops)
        run = RunningJob("r", 0, spec, (request,), dispatcher.generate)
        async for _batch in run.batches():
            pass
        assert run.num_completion_tokens == num_tokens
        learned = OutputLengths()
        learned.observe("toy", num_tokens)
        assert fleet.answers.usual("toy") == learned.usual("toy")
