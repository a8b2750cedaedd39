"""Workers as ingresses see them: over real links, with real threads and a fake model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec
import pytest

from disagg.errors import EngineFailed, StartupError, WorkerLost
from disagg.ingress.request_state import append_tokens
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, Peers, Prefetch, TokenDelta
from disagg.worker import worker as worker_module
from disagg.worker.parts import Parts
from disagg.worker.worker import Worker
from tests.deltas import open_stream
from tests.engine.fake_runner import draft_of, expected_tokens
from tests.links.fakes import RecordingObserver, linked, until
from tests.worker.members import Member, World
from tests.worker.plays import Play, Trip, request_of
from tests.worker.rig import BLOCK_SIZE, CONFIG, KEY, TIER, Rig, rig

PROMPT = tuple(range(4, 25))  # five full blocks and one token


def make_request(max_tokens: int = 6, prompt: tuple[int, ...] = PROMPT) -> GenerateRequest:
    trip = Trip(0, prompt, max_tokens, deadline_s=1e12)
    request = request_of(trip, "request", BLOCK_SIZE)
    sampling = msgspec.structs.replace(request.sampling, stop_token_ids=())
    return msgspec.structs.replace(request, sampling=sampling)


def answer_to(request: GenerateRequest) -> list[int]:
    return expected_tokens(request.token_ids, request.sampling.max_tokens, frozenset())


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def prefilled(rig: Rig, request: GenerateRequest) -> tuple[GenerateRequest, TokenDelta]:
    """The request with its first token, and the delta that has its ticket."""
    *_, delta = await rig.all("prefill", request, hand_over=True)
    assert delta.ticket is not None and len(delta.token_ids) == 1
    return append_tokens(request, list(delta.token_ids), BLOCK_SIZE), delta


async def test_a_request_goes_over_both_workers() -> None:
    async with rig("prefill", "decode") as r:
        request = make_request()
        moved, first = await prefilled(r, request)
        assert first.ticket is not None and first.ticket.num_tokens == len(PROMPT)
        deltas = await r.all("decode", moved, ticket=first.ticket)
        assert [*first.token_ids, *tokens(deltas)] == answer_to(request)
        assert deltas[-1].finish_reason == "length"
        assert r.runners["decode"].num_computed == 5, "the prompt was computed once more"
        await r.until_empty("prefill")
        await r.until_empty("decode")


async def test_what_is_known_of_a_worker_goes_with_it() -> None:
    """Workers come and go for weeks; what pulls from them took is in every frame."""
    async with rig("prefill", "decode") as r:
        moved, first = await prefilled(r, make_request())
        await r.all("decode", moved, ticket=first.ticket)
        transfers = [each.source_id for each in r.workers["decode"]._core.status().transfers]
        assert transfers == ["prefill"]
        r.links["decode"].send(Peers((), ("prefill",)))
        await until(lambda: not r.workers["decode"]._core.status().transfers)
        assert first.ticket is not None
        assert r.transports["decode"]._book.peer_of(first.ticket) is None


async def prefix_of(rig: Rig, request: GenerateRequest) -> TokenDelta:
    """The answer to a request for the cached prefix of the prompt."""
    asked = msgspec.structs.replace(request, token_ids=())
    *_, delta = await rig.all("prefill", asked, hand_over=True)
    assert delta.token_ids == ()
    return delta


async def prefilled_in_two(r: Rig, request: GenerateRequest) -> tuple[KVTicket, TokenDelta]:
    """The early ticket after the first of two chunks, and what comes after the second."""
    runner = r.runners["prefill"]
    runner.num_runs_left = 1
    async with aclosing(open_stream(r.links["prefill"], request, True)) as stream:
        early = await anext(stream)
        assert early.early_ticket is not None and not early.is_last and not early.token_ids
        await until(lambda: runner.is_waiting)
        runner.gate.set()
        last = await anext(stream)
    assert last.ticket is not None and last.early_ticket is None
    return early.early_ticket, last


async def test_what_is_ready_moves_while_the_rest_is_computed() -> None:
    """Two chunks: the first one's blocks go ahead, and the ticket brings only the others."""
    async with rig("prefill", "decode") as r:
        request = make_request()
        early, last = await prefilled_in_two(r, request)
        assert early.num_tokens == 16
        names = request.block_hashes[:4]
        r.links["decode"].send(Prefetch(early, names))
        await until(lambda: r.observer.held["decode"] >= set(names))
        moved = append_tokens(request, list(last.token_ids), BLOCK_SIZE)
        deltas = await r.all("decode", moved, ticket=last.ticket)
        assert [*last.token_ids, *tokens(deltas)] == answer_to(request)
        assert r.runners["decode"].num_computed == 5, "the prompt was computed once more"
        for worker_id in ("prefill", "decode"):
            await r.until_empty(worker_id)


async def test_who_comes_during_an_early_pull_waits_for_it() -> None:
    async with rig("prefill", "decode") as r:
        request = make_request()
        early, last = await prefilled_in_two(r, request)
        transport, core = r.transports["decode"], r.workers["decode"]._core
        transport.hangs = True
        r.links["decode"].send(Prefetch(early, request.block_hashes[:4]))
        await until(lambda: bool(core._kv_import._moving))
        moved = append_tokens(request, list(last.token_ids), BLOCK_SIZE)
        answer = asyncio.create_task(r.all("decode", moved, ticket=last.ticket))
        await until(lambda: bool(core._kv_import._queued))
        transport.hangs = False
        assert [*last.token_ids, *tokens(await answer)] == answer_to(request)
        assert r.runners["decode"].num_computed == 5, "the prompt was computed once more"
        await r.until_empty("decode")


async def test_a_worker_that_leaves_pulls_nothing_early() -> None:
    async with rig("prefill") as r:
        await r.start("decode", worker_id="leaver")
        request = make_request()
        early, _ = await prefilled_in_two(r, request)
        core = r.workers["leaver"]._core
        core.accepting = False
        core.prefetch(Prefetch(early, request.block_hashes[:4]), 0.0)
        assert not core._kv_import._moving


async def test_a_prefix_is_pulled_and_only_the_rest_is_computed() -> None:
    async with rig("prefill", "decode") as r:
        request = make_request()
        refusal = await prefix_of(r, request)
        assert refusal.error is not None and refusal.error.code == "unavailable"
        await prefilled(r, request)
        granted = await prefix_of(r, request)
        assert granted.ticket is not None and granted.ticket.num_tokens == len(PROMPT) - 1
        (first, *others) = await r.all("decode", request, ticket=granted.ticket)
        assert tokens([first, *others]) == answer_to(request)
        assert first.num_cached_tokens == len(PROMPT) - 1
        assert r.runners["decode"].num_computed == 6, "one token of the prompt, five of the answer"


async def test_a_prefix_source_answers_before_it_computes_on() -> None:
    """It has just begun a prompt: who asks for its prefix waits for one step, and not for two."""
    async with rig("prefill") as r:
        await prefilled(r, make_request())
        runner = r.runners["prefill"]
        runner.num_runs_left = 0
        other = asyncio.create_task(r.all("prefill", make_request(prompt=tuple(range(30, 60)))))
        await until(lambda: runner.is_waiting)
        granted = asyncio.create_task(prefix_of(r, make_request()))
        await until(r.workers["prefill"]._thread._messages.qsize)
        runner.num_runs_left = 0  # after the one under way
        runner.gate.set()
        assert (await granted).ticket is not None
        await until(lambda: runner.is_waiting)
        runner.gate.set()
        await other


@pytest.mark.parametrize("num_wrong", [0, 2])
async def test_prefill_verifies_a_draft_and_hands_over_what_is_right(num_wrong: int) -> None:
    async with rig("prefill", "decode") as r:
        draft = draft_of(PROMPT, 4, num_wrong)
        request = msgspec.structs.replace(make_request(max_tokens=9), draft_token_ids=draft)
        *_, first = await r.all("prefill", request, hand_over=True)
        assert list(first.token_ids) == answer_to(request)[:5] and first.ticket is not None
        assert first.ticket.num_tokens == len(PROMPT) + 4, "all but the last token have KV"
        moved = append_tokens(request, list(first.token_ids), BLOCK_SIZE)
        assert not moved.draft_token_ids
        deltas = await r.all("decode", moved, ticket=first.ticket)
        assert [*first.token_ids, *tokens(deltas)] == answer_to(request)
        assert r.runners["decode"].num_computed == 4, "nothing was computed again"
        await r.until_empty("prefill")
        await r.until_empty("decode")


async def _while_queued(r: Rig) -> None:
    messages, runner = r.workers["decode"]._thread._messages, r.runners["decode"]
    runner.gate.clear()
    first = asyncio.create_task(r.all("decode", make_request()))
    await until(lambda: runner.is_waiting)
    queued = [asyncio.create_task(r.all("decode", make_request())) for _ in range(5)]
    await until(lambda: messages.qsize() >= 5)
    for task in queued:
        task.cancel()
    await until(lambda: messages.qsize() >= 10)
    runner.gate.set()
    assert tokens(await first) == answer_to(make_request())


async def _while_pulling(r: Rig) -> None:
    moved, first = await prefilled(r, make_request())
    r.transports["decode"].hangs = True
    task = asyncio.create_task(r.all("decode", moved, ticket=first.ticket))
    await until(lambda: r.transports["decode"]._pulls)
    task.cancel()
    await asyncio.wait([task])
    await r.workers["decode"].check()
    assert r.transports["decode"]._book.num_blocks_filling, "blocks came back too early"
    r.transports["decode"].hangs = False


@pytest.mark.parametrize(
    "phase",
    [_while_queued, _while_pulling],
    ids=lambda phase: phase.__name__.strip("_"),
)
async def test_a_cancelled_request_gives_everything_back(
    phase: Callable[[Rig], Awaitable[None]],
) -> None:
    async with rig("prefill", "decode") as r:
        await phase(r)
        await r.until_empty("decode")
        await r.until_empty("prefill")
        assert tokens(await r.all("decode", make_request())) == answer_to(make_request())


async def test_other_ingresses_hear_of_a_request_before_its_first_step_has_ended() -> None:
    async with rig("decode") as r:
        other = RecordingObserver()
        async with linked(r.workers["decode"].record, other, KEY.encode(), "ingress-1"):
            await until(lambda: "decode" in other.statuses)
            assert other.statuses["decode"].home_ingress in ("ingress-0", "ingress-1")
            r.runners["decode"].gate.clear()
            asked = asyncio.create_task(r.all("decode", make_request()))
            await until(lambda: other.statuses["decode"].num_uncomputed_tokens == len(PROMPT))
            assert r.observer.statuses["decode"].num_uncomputed_tokens == 0, "it counts its own"
            r.runners["decode"].gate.set()
            assert tokens(await asked) == answer_to(make_request())


async def test_a_new_link_hears_what_the_cache_holds() -> None:
    async with rig("decode") as r:
        await r.all("decode", make_request(max_tokens=40))
        late = RecordingObserver()
        async with linked(r.workers["decode"].record, late, KEY.encode()):
            await until(lambda: "decode" in late.held)
            assert len(late.held["decode"]) == (len(PROMPT) + 39) // BLOCK_SIZE
            await until(lambda: late.held["decode"] == r.observer.held["decode"])


async def test_a_draining_worker_finishes_what_runs_and_refuses_the_rest() -> None:
    async with rig("decode") as r:
        request = make_request(max_tokens=120)
        r.runners["decode"].gate.clear()
        running = asyncio.create_task(r.all("decode", request))
        await until(lambda: r.runners["decode"].is_waiting)
        draining = asyncio.create_task(r.workers["decode"].drain(30.0))
        await asyncio.sleep(0)  # its word to the engine goes before the next request's
        refused = asyncio.create_task(r.all("decode", make_request()))
        await until(lambda: r.workers["decode"]._thread._messages.qsize() >= 3)
        r.runners["decode"].gate.set()
        assert tokens(await running) == answer_to(request)
        (refusal,) = await refused
        assert refusal.error is not None and refusal.error.code == "unavailable"
        await draining
        assert not r.links["decode"].is_up


async def test_ingresses_hear_at_once_of_a_drain() -> None:
    async with rig("prefill") as r:
        await prefilled(r, make_request())  # its hold keeps the worker up
        draining = asyncio.create_task(r.workers["prefill"].drain(30.0))
        await until(lambda: not r.observer.statuses["prefill"].accepting)
        draining.cancel()
        await asyncio.wait([draining])


async def test_a_drain_keeps_its_time_when_the_engine_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "STOP_TIMEOUT_S", 0.05)
    async with rig("decode") as r:
        r.runners["decode"].gate.clear()
        stuck = asyncio.create_task(r.all("decode", make_request()))
        await until(lambda: r.runners["decode"].is_waiting)
        async with asyncio.timeout(120):
            await r.workers["decode"].drain(0.05)
        with pytest.raises(WorkerLost):
            await stuck


async def test_a_broken_engine_answers_everybody_wherever_they_are() -> None:
    async with rig("prefill", "decode") as r:
        moved, first = await prefilled(r, make_request())
        r.transports["decode"].hangs = True
        arriving = asyncio.create_task(r.all("decode", moved, ticket=first.ticket))
        await until(lambda: r.transports["decode"]._pulls)
        r.workers["decode"].check_health()
        r.runners["decode"].breaks = True
        running = asyncio.create_task(r.all("decode", make_request(max_tokens=9)))
        for task in (arriving, running, asyncio.create_task(r.all("decode", make_request()))):
            error = (await task)[-1].error
            assert error is not None
            # Only the one in the step may be the cause.
            expected = ("engine_failed",) if task is running else ("worker_lost", "unavailable")
            assert error.code in expected
        with pytest.raises(EngineFailed, match="fell off the bus"):
            r.workers["decode"].check_health()
        r.workers["prefill"].check_health()


async def test_a_broken_engine_is_not_drained() -> None:
    """Its worker would keep its device until nobody can want the KV that it holds for others."""
    async with rig("prefill", "decode") as r:
        await prefilled(r, make_request())
        r.runners["prefill"].breaks = True
        error = (await r.all("prefill", make_request()))[-1].error
        assert error is not None and error.code == "engine_failed"
        async with asyncio.timeout(20):
            await r.workers["prefill"].drain(600)


async def test_a_drain_ends_when_its_engine_breaks() -> None:
    async with rig("prefill", "decode") as r:
        await prefilled(r, make_request())
        runner = r.runners["prefill"]
        runner.gate.clear()
        running = asyncio.create_task(r.all("prefill", make_request()))
        await until(lambda: runner.is_waiting)
        draining = asyncio.create_task(r.workers["prefill"].drain(600))
        await asyncio.sleep(0)
        runner.breaks = True
        runner.gate.set()
        error = (await running)[-1].error
        assert error is not None and error.code == "engine_failed"
        async with asyncio.timeout(20):
            await draining


async def test_a_refused_request_harms_nobody_else() -> None:
    async with rig("decode") as r:
        running = asyncio.create_task(r.all("decode", make_request(max_tokens=50)))
        (refusal,) = await r.all("decode", make_request(max_tokens=5000))
        assert refusal.error is not None and refusal.error.code == "invalid_value"
        assert tokens(await running) == answer_to(make_request(max_tokens=50))
        await r.until_empty("decode")


async def test_a_worker_that_cannot_listen_leaves_nothing_behind() -> None:
    def build(*args: object) -> Parts:
        return Member(World(Play(BLOCK_SIZE, (8,) * 4, ())), 0).parts

    with pytest.raises(StartupError, match="Cannot listen"):
        await Worker.start(
            CONFIG, TIER, "decode", worker_id="x", epoch=1, host="192.0.2.1", build=build
        )
    assert not any(thread.name.startswith("engine") for thread in threading.enumerate())


@pytest.mark.parametrize("named_by", [2, 8])
async def test_blocks_named_by_another_size_are_named_anew(named_by: int) -> None:
    """While an update changes the size of blocks, ingresses name them by the old one."""
    async with rig("prefill", "decode") as r:
        request = request_of(Trip(0, PROMPT, 6, deadline_s=1e12), "request", named_by)
        request = msgspec.structs.replace(
            request, sampling=make_request().sampling, block_size=named_by
        )
        *_, first = await r.all("prefill", request, hand_over=True)
        assert first.error is None and first.ticket is not None
        moved = append_tokens(request, list(first.token_ids), named_by)
        deltas = await r.all("decode", moved, ticket=first.ticket)
        assert [*first.token_ids, *tokens(deltas)] == answer_to(make_request())
        *_, again = await r.all("prefill", request, hand_over=True)
        assert again.num_cached_tokens == 20, "the names of this worker were not found again"
        await r.until_empty("decode")


async def test_closing_waits_for_no_thread_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs makes its thread late, which must not hold up what else the loop does."""
    idents: list[int] = []
    async with rig("decode") as r:
        core = r.workers["decode"]._core
        close = core.close

        def noted() -> None:
            idents.append(threading.get_ident())
            close()

        monkeypatch.setattr(core, "close", noted)
        await r.workers["decode"].close()
        assert idents and idents[0] != threading.get_ident()
        monkeypatch.setattr(core, "close", lambda: None)  # the rig closes it once more
