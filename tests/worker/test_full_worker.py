"""A worker whose memory for requests is full refuses more of them, and says so to routers."""

from __future__ import annotations

import asyncio

from disagg.messages import TokenDelta
from disagg.worker.streams import TOKEN_NBYTES
from tests.links.fakes import until
from tests.worker.rig import Rig, rig
from tests.worker.test_worker import PROMPT, answer_to, make_request, prefilled, tokens


def reported_nbytes(r: Rig, worker_id: str = "decode") -> int:
    return r.observer.statuses[worker_id].requests_nbytes


async def all_of(r: Rig, num: int) -> list[asyncio.Task[list[TokenDelta]]]:
    tasks = [asyncio.create_task(r.all("decode", make_request())) for _ in range(num)]
    await asyncio.sleep(0)
    return tasks


async def test_what_does_not_fit_is_refused_retryably_and_harms_nobody() -> None:
    async with rig("decode") as r:
        r.workers["decode"]._core._max_requests_nbytes = 2 * TOKEN_NBYTES * len(PROMPT)
        runner = r.runners["decode"]
        runner.gate.clear()
        taken = await all_of(r, 1)
        await until(lambda: runner.is_waiting)
        more = await all_of(r, 4)
        await until(lambda: r.workers["decode"]._thread._messages.qsize() >= 4)
        runner.gate.set()
        ends = [await task for task in [*taken, *more]]
        refused = [end[-1].error for end in ends if end[-1].error is not None]
        assert [error.code for error in refused if error] == ["overloaded"] * 3
        served = [end for end in ends if end[-1].error is None]
        assert [tokens(end) for end in served] == [answer_to(make_request())] * 2
        await until(lambda: reported_nbytes(r) == 0)
        assert tokens(await r.all("decode", make_request())) == answer_to(make_request())
        await r.until_empty("decode")


async def test_routers_hear_how_much_waits() -> None:
    async with rig("decode") as r:
        r.runners["decode"].num_runs_left = 1
        tasks = await all_of(r, 3)
        await until(lambda: reported_nbytes(r) == 3 * TOKEN_NBYTES * len(PROMPT))
        r.runners["decode"].num_runs_left = -1
        r.runners["decode"].gate.set()
        await asyncio.gather(*tasks)
        await until(lambda: reported_nbytes(r) == 0)


async def test_one_request_alone_is_never_too_much() -> None:
    async with rig("decode") as r:
        r.workers["decode"]._core._max_requests_nbytes = 1
        assert tokens(await r.all("decode", make_request())) == answer_to(make_request())


async def test_a_refused_arrival_keeps_its_ticket_for_another_worker() -> None:
    """The worker that refuses takes nothing: the source still holds the blocks."""
    async with rig("prefill", "decode") as r:
        moved, first = await prefilled(r, make_request())
        core = r.workers["decode"]._core
        core._max_requests_nbytes = TOKEN_NBYTES
        r.runners["decode"].gate.clear()
        (running,) = await all_of(r, 1)
        await until(lambda: r.runners["decode"].is_waiting)
        refused = asyncio.create_task(r.all("decode", moved, ticket=first.ticket))
        await until(lambda: r.workers["decode"]._thread._messages.qsize())
        r.runners["decode"].gate.set()
        (end,) = await refused
        assert end.error is not None and end.error.code == "overloaded"
        assert tokens(await running) == answer_to(make_request())
        assert r.workers["prefill"]._core.status().num_holds == 1
        deltas = await r.all("decode", moved, ticket=first.ticket)
        assert [*first.token_ids, *tokens(deltas)] == answer_to(make_request())
        for role in ("prefill", "decode"):
            await r.until_empty(role)
