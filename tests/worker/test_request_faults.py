"""A request whose own handling fails ends alone: the worker goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from disagg.decode_worker.arrivals import Arrivals
from disagg.engine.engine import Engine
from disagg.engine.sequence import Sequence
from tests.links.fakes import until
from tests.worker.rig import Rig, rig
from tests.worker.test_worker import answer_to, make_request, prefilled, tokens

UNLUCKY = tuple(range(60, 81))


async def others_go_on(r: Rig, unlucky: asyncio.Task[Any]) -> None:
    """Before, during and after the one that fails."""
    during = asyncio.create_task(r.all("decode", make_request(30)))
    (end,) = await unlucky
    assert end.error is not None and end.error.code == "engine_failed"
    assert "planted" in end.error.message
    assert tokens(await during) == answer_to(make_request(30))
    assert r.workers["decode"]._thread.failed is None
    assert tokens(await r.all("decode", make_request())) == answer_to(make_request())
    await r.until_empty("decode")


async def test_a_request_that_breaks_on_entering_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = Engine.submit

    def breaks(self: Engine, sequence: Sequence) -> None:
        submit(self, sequence)
        if tuple(sequence.tokens) == UNLUCKY:
            raise RuntimeError("planted")

    monkeypatch.setattr(Engine, "submit", breaks)
    async with rig() as r:
        await r.start("decode")
        unlucky = asyncio.create_task(r.all("decode", make_request(prompt=UNLUCKY)))
        await others_go_on(r, unlucky)


async def test_a_ticket_that_breaks_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Arrivals, sequence: Sequence, ticket: object) -> None:
        raise RuntimeError("planted")

    async with rig() as r:
        await r.start("prefill")
        await r.start("decode")
        moved, first = await prefilled(r, make_request(prompt=UNLUCKY))
        monkeypatch.setattr(Arrivals, "admit", breaks)
        unlucky = asyncio.create_task(r.all("decode", moved, ticket=first.ticket))
        await others_go_on(r, unlucky)
        assert first.ticket is not None
        r.links["prefill"].release(first.ticket)
        await r.until_empty("prefill")


async def test_a_pull_that_cannot_even_begin_is_computed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as r:
        await r.start("prefill")
        await r.start("decode")
        request = make_request()
        moved, first = await prefilled(r, request)

        def breaks(*arguments: Any) -> int:
            raise ValueError("planted")

        monkeypatch.setattr(r.transports["decode"], "pull", breaks)
        deltas = await r.all("decode", moved, ticket=first.ticket)
        assert [*first.token_ids, *tokens(deltas)] == answer_to(request)
        assert r.workers["decode"]._thread.failed is None
        await until(lambda: r.observer.statuses["prefill"].num_holds == 0)
        for worker_id in ("prefill", "decode"):
            await r.until_empty(worker_id)
