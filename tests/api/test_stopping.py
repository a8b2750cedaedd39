"""A server that is told to stop: nothing new, running answers end, the last ones with an error."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disagg.api.http import app as http_app
from disagg.api.http.app import AsgiApp
from disagg.api.http.request import HttpRequest
from tests.api.apps import URL, Exchange, http_client, make_app, never, until
from tests.api.fakes import FakeGenerate
from tests.contract.contract import CHAT


async def failures(app: AsgiApp) -> dict[str, float]:
    """Failed requests by code, as `/metrics` has them."""
    async with http_client(app) as client:
        text = (await client.get("/metrics")).text
    return {
        sample.labels["code"]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "disagg_request_failure"
        for sample in family.samples
    }


async def test_what_runs_ends_and_what_is_new_is_refused() -> None:
    gate = asyncio.Event()
    generate = FakeGenerate(pause=lambda: asyncio.ensure_future(gate.wait()))  # type: ignore[arg-type]
    app = make_app(generate)
    exchange = Exchange(app, CHAT | {"stream": True})
    await until(lambda: generate.num_open == 1)
    drained = asyncio.create_task(app.drain(10))
    await asyncio.sleep(0)
    async with http_client(app) as client:
        refused = await client.post(URL, json=CHAT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        assert "disagg_num_requests_running 1.0" in (await client.get("/metrics")).text
    gate.set()
    assert await drained == (1, 0)
    await exchange.done
    assert exchange.text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_takes_too_long_ends_with_an_error(stream: bool) -> None:
    pauses = iter(range(2))
    generate = FakeGenerate(
        pause=lambda: (
            asyncio.ensure_future(asyncio.sleep(0)) if next(pauses, None) is not None else never()
        )
    )
    app = make_app(generate)
    exchange = Exchange(app, CHAT | {"stream": stream})
    await until(lambda: generate.num_open == 1)
    if stream:
        await exchange.until_text("quick")
    assert await app.drain(0.0) == (0, 1)
    await exchange.done
    assert generate.num_open == 0
    error = json.loads(exchange.text.rstrip().removeprefix("data: ").split("data: ")[-1])["error"]
    assert error["code"] == "unavailable" and "stopped" in error["message"]
    assert await failures(app) == {"unavailable": 1.0}


async def test_refused_requests_are_not_held() -> None:
    app = make_app()
    await app.drain(0)
    gc.collect()
    gc.disable()
    before = requests()
    try:
        async with http_client(app) as client:
            for _ in range(3):
                assert (await client.post(URL, json=CHAT)).status_code == 503
        for _ in range(10):  # of the loop, in which tasks end
            await asyncio.sleep(0)
        assert not [each for each in requests() if each not in before]
    finally:
        gc.enable()


def requests() -> list[HttpRequest]:
    return [each for each in gc.get_objects() if isinstance(each, HttpRequest)]


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_server_that_is_not_ended_after_all_serves_again(is_over: bool) -> None:
    """Whether the drain waits still or has cut what ran."""
    gate = asyncio.Event()
    generate = FakeGenerate(pause=lambda: asyncio.ensure_future(gate.wait()))  # type: ignore[arg-type]
    app = make_app(generate)
    exchange = Exchange(app, CHAT | {"stream": True})
    await until(lambda: generate.num_open == 1)
    drained = asyncio.create_task(app.drain(0.0 if is_over else 0.05))
    await (drained if is_over else asyncio.sleep(0))
    app.serve_again()
    assert await drained == (0, int(is_over))
    gate.set()
    await exchange.done
    assert is_over or exchange.text.rstrip().endswith("data: [DONE]")
    async with http_client(app) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post(URL, json=CHAT)).status_code == 200


async def test_a_server_whose_end_does_not_come_serves_again_unless_it_drains_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app()
    monkeypatch.setattr(http_app, "END_WAIT_S", 0.0)
    await app.drain(0.0)
    monkeypatch.setattr(http_app, "END_WAIT_S", 600.0)
    await app.drain(0.0)
    await asyncio.sleep(0.01)  # until after the end that the first one expected
    async with http_client(app) as client:
        assert (await client.get("/ready")).status_code == 503
        monkeypatch.setattr(http_app, "END_WAIT_S", 0.0)
        await app.drain(0.0)
        await asyncio.sleep(0.01)
        assert (await client.get("/ready")).status_code == 200


async def test_an_idle_server_has_drained_at_once() -> None:
    assert await make_app().drain(60.0) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_counts_as_a_failure_and_a_client_that_leaves_does_not(stream: bool) -> None:
    app = make_app(FakeGenerate(fail_after=1, error=ValueError("a bug")))
    failed = Exchange(app, CHAT | {"stream": stream})
    await failed.done
    assert await failures(app) == {"internal_error": 1.0}
    generate = FakeGenerate(pause=never)
    app = make_app(generate)
    left = Exchange(app, CHAT | {"stream": stream})
    await until(lambda: generate.num_open == 1)
    left.hang_up()
    await left.done
    assert await failures(app) == {}
