"""A request whose own handling fails ends alone: the worker goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.kvtransfer.ticket import issue_ticket
from disagg.messages import GenerateRequest, Release
from disagg.worker import kv_export
from disagg.worker.kv_import import KVImport
from disagg.worker.streams import Phases
from tests.links.fakes import until
from tests.worker.rig import Rig, rig
from tests.worker.test_worker import PROMPT, answer_to, make_request, prefilled, tokens

UNLUCKY = tuple(range(60, 81))


async def others_go_on(r: Rig, unlucky: asyncio.Task[Any]) -> None:
    """Before, during and after the one that fails."""
    during = asyncio.create_task(r.all("decode", make_request(30)))
    *_, end = await unlucky
    assert end.error is not None and end.error.code == "request_failed"
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
    async with rig("decode") as r:
        unlucky = asyncio.create_task(r.all("decode", make_request(prompt=UNLUCKY)))
        await others_go_on(r, unlucky)


def break_once(monkeypatch: pytest.MonkeyPatch, *, is_early: bool) -> None:
    """The next ticket, early or last, cannot be issued."""
    breaks_now = [True]

    def breaks(*arguments: Any, **named: Any) -> object:
        if breaks_now and ("+" in named["ticket_id"]) == is_early:
            breaks_now.pop()
            raise RuntimeError("planted")
        return issue_ticket(*arguments, **named)

    monkeypatch.setattr(kv_export, "issue_ticket", breaks)


async def test_an_early_ticket_that_cannot_be_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    break_once(monkeypatch, is_early=True)
    async with rig("prefill") as r:
        (delta,) = await r.all("prefill", make_request(), hand_over=True)
        assert delta.ticket is not None
        r.links["prefill"].send(Release(delta.ticket.ticket_id))
        await r.until_empty("prefill")


async def test_blocks_that_get_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    break_once(monkeypatch, is_early=False)
    async with rig("decode") as r:
        request = make_request(prompt=UNLUCKY)
        await others_go_on(r, asyncio.create_task(r.all("decode", request, hand_over=True)))
        *_, first = await r.all("decode", make_request(), hand_over=True)
        assert first.ticket is not None and first.ticket.num_tokens == len(PROMPT)
        r.links["decode"].send(Release(first.ticket.ticket_id))
        await r.until_empty("decode")


@pytest.mark.parametrize(("hand_over", "num_tokens"), [(False, 1), (False, 3), (True, 1)])
async def test_a_token_that_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, hand_over: bool, num_tokens: int
) -> None:
    """Its first one, when it may be leaving with a ticket, or one in the middle."""
    gained, made = Phases.gained, Phases.__init__
    unlucky: dict[Phases, int] = {}

    def begins(self: Phases, request: GenerateRequest, *others: Any, **named: Any) -> None:
        made(self, request, *others, **named)
        if request.token_ids == UNLUCKY:
            unlucky[self] = num_tokens

    def breaks(self: Phases, now: float, event: TokenEvent) -> None:
        if self in unlucky:
            unlucky[self] -= 1
            if not unlucky[self]:
                raise RuntimeError("planted")
        gained(self, now, event)

    monkeypatch.setattr(Phases, "__init__", begins)
    monkeypatch.setattr(Phases, "gained", breaks)
    async with rig("decode") as r:
        request = make_request(prompt=UNLUCKY)
        asked = r.all("decode", request, hand_over=hand_over)
        await others_go_on(r, asyncio.create_task(asked))


async def test_a_pull_that_came_and_cannot_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    join = Engine.join

    def breaks(self: Engine, sequence: Sequence) -> None:
        if tuple(sequence.tokens[: len(UNLUCKY)]) == UNLUCKY:
            raise RuntimeError("planted")
        join(self, sequence)

    monkeypatch.setattr(Engine, "join", breaks)
    async with rig("prefill", "decode") as r:
        moved, first = await prefilled(r, make_request(prompt=UNLUCKY))
        unlucky = asyncio.create_task(r.all("decode", moved, ticket=first.ticket))
        await others_go_on(r, unlucky)
        await r.until_empty("prefill")


async def test_a_ticket_that_breaks_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: KVImport, ticket: object, sequence: Sequence, traceparent: str) -> None:
        raise RuntimeError("planted")

    async with rig("prefill", "decode") as r:
        moved, first = await prefilled(r, make_request(prompt=UNLUCKY))
        monkeypatch.setattr(KVImport, "_source_of", breaks)
        unlucky = asyncio.create_task(r.all("decode", moved, ticket=first.ticket))
        await others_go_on(r, unlucky)
        assert first.ticket is not None
        r.links["prefill"].send(Release(first.ticket.ticket_id))
        await r.until_empty("prefill")


async def test_a_pull_that_cannot_even_begin_is_computed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig("prefill", "decode") as r:
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
