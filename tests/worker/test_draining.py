"""A planned stop: what has not begun is refused, what will not end in time goes on elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from disagg.ingress.request_state import append_tokens
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, Release, TokenDelta
from disagg.time_model import StepTimeModel
from disagg.worker.core import WorkerCore
from tests.deltas import open_stream
from tests.links.fakes import until
from tests.worker.rig import BLOCK_SIZE, Rig, rig
from tests.worker.test_worker import answer_to, make_request, tokens


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer would end by itself in time."""
    empty = WorkerCore._empty
    monkeypatch.setattr(WorkerCore, "_empty", lambda core, left_s: empty(core, -1.0))


async def follow(
    r: Rig, worker_id: str, request: GenerateRequest, ticket: KVTicket | None = None
) -> tuple[list[int], TokenDelta]:
    """The tokens of a request on a worker, and its last delta there."""
    deltas = await r.all(worker_id, request, ticket=ticket)
    return tokens(deltas), deltas[-1]


@pytest.mark.usefixtures("in_a_hurry")
async def test_the_kv_of_a_running_sequence_moves() -> None:
    async with rig("decode") as r:
        await r.start("decode", worker_id="other")
        r.runners["decode"].gate.clear()
        request = make_request(max_tokens=150)
        leaving = asyncio.create_task(follow(r, "decode", request))
        await until(lambda: r.runners["decode"].is_waiting)
        draining = asyncio.create_task(r.workers["decode"].drain(60.0))
        r.runners["decode"].gate.set()
        had, last = await leaving
        assert last.ticket is not None and last.error is None and 0 < len(had) < 150
        assert not draining.done(), "gone before its KV was fetched"
        moved = append_tokens(request, had, BLOCK_SIZE)
        rest, last = await follow(r, "other", moved, last.ticket)
        assert [*had, *rest] == answer_to(request) and last.finish_reason == "length"
        assert r.runners["other"].num_computed == len(rest), "what was computed was not pulled"
        await draining
        await until(lambda: not r.links["decode"].is_up)
        await r.until_empty("other")


async def test_what_ends_in_time_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimeModel, "decode_step_s", lambda *arguments: 0.1)
    async with rig() as r:
        await r.start("decode", num_blocks=512)
        runner, scheduler = r.runners["decode"], r.workers["decode"]._engine.scheduler
        runner.gate.clear()
        requests = [make_request(max_tokens=100), make_request(max_tokens=900)]
        visits = [asyncio.create_task(follow(r, "decode", request)) for request in requests]
        while len(scheduler.running) < 2:
            runner.num_runs_left = 1
            runner.gate.set()
            await until(lambda: not runner.gate.is_set() and runner.is_waiting)
        draining = asyncio.create_task(r.workers["decode"].drain(60.0))
        runner.num_runs_left = -1
        runner.gate.set()
        (short, last), (had, other) = await asyncio.gather(*visits)
        assert short == answer_to(requests[0]) and last.finish_reason == "length"
        assert other.ticket is not None and had == answer_to(requests[1])[: len(had)]
        r.links["decode"].send(Release(other.ticket.ticket_id))
        await draining


@pytest.mark.usefixtures("in_a_hurry")
async def test_a_client_that_is_gone_keeps_no_draining_worker() -> None:
    async with rig("decode") as r:
        r.runners["decode"].gate.clear()
        stream = open_stream(r.links["decode"], make_request(max_tokens=200))
        async with aclosing(stream):
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: r.runners["decode"].is_waiting)
            draining = asyncio.create_task(r.workers["decode"].drain(60.0))
            first.cancel()
            await asyncio.wait([first])
        r.runners["decode"].gate.set()
        async with asyncio.timeout(120):
            await draining
