"""Clients that go away or read slowly end their own work, and wait for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from disagg.api.http import reply
from disagg.api.http.metrics import ApiMetrics
from disagg.messages import GenerateRequest, PutDelta
from tests.api.apps import URL, Exchange, make_app, never, until
from tests.api.fakes import FakeGenerate
from tests.contract.contract import CHAT


def stuck_after(num_tokens: int) -> Callable[[], asyncio.Future[None]]:
    """A pause before each of so many tokens, and then one without an end."""
    pauses = iter(range(num_tokens))
    return lambda: (
        asyncio.ensure_future(asyncio.sleep(0)) if next(pauses, None) is not None else never()
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_client_that_goes_away_ends_its_work(stream: bool, num_choices: int) -> None:
    generate = FakeGenerate(pause=never)
    exchange = Exchange(make_app(generate), CHAT | {"stream": stream, "n": num_choices})
    await until(lambda: generate.num_open == num_choices)
    exchange.hang_up()
    await exchange.done
    assert (generate.num_open, generate.num_closed) == (0, num_choices)
    assert exchange.sent == []


async def test_a_client_that_goes_away_inside_a_stream_ends_its_work() -> None:
    generate = FakeGenerate(pause=stuck_after(2))
    exchange = Exchange(make_app(generate), CHAT | {"stream": True})
    await exchange.until_text("quick")
    exchange.hang_up()
    await exchange.done
    assert generate.num_open == 0
    assert "[DONE]" not in exchange.text


async def test_a_client_that_goes_away_inside_its_body_is_nobodys_request() -> None:
    generate = FakeGenerate()
    exchange = Exchange(make_app(generate), CHAT)
    exchange._incoming.get_nowait()
    exchange._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    exchange.hang_up()
    await exchange.done
    assert generate.requests == []


async def test_a_cancelled_server_task_leaves_nothing_behind() -> None:
    generate, metrics = FakeGenerate(pause=never), ApiMetrics()
    exchange = Exchange(make_app(generate, metrics=metrics), CHAT)
    await until(lambda: generate.num_open == 1)
    exchange.done.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.done
    assert generate.num_open == 0
    assert len(asyncio.all_tasks()) == 1
    shown = metrics.expose().decode()  # Serve cancels when a client goes away: it counts as that
    assert "disagg_request_disconnect_total 1.0" in shown
    assert f'disagg_http_requests_total{{code="499",route="{URL}"}} 1.0' in shown


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "PING_AFTER_S", 0.01)
    generate = FakeGenerate(pause=stuck_after(1))
    exchange = Exchange(make_app(generate), CHAT | {"stream": True})
    await exchange.until_text(": ping\n\n")
    exchange.hang_up()
    await exchange.done


async def test_a_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "PING_AFTER_S", 0.01)
    generate = FakeGenerate(pause=lambda: asyncio.ensure_future(asyncio.sleep(0.002)), finish=False)
    body = CHAT | {"stream": True, "max_tokens": 400}
    exchange = Exchange(make_app(generate), body, stops_at=lambda message: "more_body" in message)
    await exchange.done
    assert (generate.num_open, generate.num_closed) == (0, 1)
    assert len(exchange.sent) == 2  # the head and the write that blocked


async def test_what_is_counted_comes_back_from_a_request_that_is_cancelled_twice() -> None:
    asked, leaving = asyncio.Event(), asyncio.Event()

    async def reluctant(request: GenerateRequest, put: PutDelta) -> None:
        try:
            asked.set()
            await never()
        finally:
            leaving.set()
            await asyncio.sleep(0.05)

    metrics = ApiMetrics()
    exchange = Exchange(make_app(reluctant, metrics=metrics), CHAT)
    await asyncio.wait_for(asked.wait(), timeout=60)
    exchange.done.cancel()
    await asyncio.wait_for(leaving.wait(), timeout=60)
    exchange.done.cancel()
    await asyncio.wait([exchange.done])
    shown = metrics.expose().decode()
    assert "disagg_requests_body_bytes 0.0" in shown
    assert "disagg_num_requests_running 0.0" in shown


async def test_tokens_that_wait_for_a_slow_client_leave_together() -> None:
    """While one write blocks, what arrives is gathered into the next write."""
    gate = asyncio.Event()
    generate = FakeGenerate(finish=False)
    exchange = Exchange(make_app(generate), CHAT | {"stream": True, "max_tokens": 100, "n": 2})
    original = exchange._send
    slow_writes = 0

    async def slow(message: MutableMapping[str, Any]) -> None:
        nonlocal slow_writes
        await original(message)
        if message.get("more_body"):
            slow_writes += 1
            await gate.wait()

    exchange._send = slow  # type: ignore[method-assign]
    await until(lambda: generate.num_closed == 2)
    gate.set()
    await exchange.done
    assert slow_writes == 3  # the first token; all others and the end; usage and [DONE]
