"""Every stage before a worker hears of a request has an end, and so has the writing of replies."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from disagg.api import apis, prompts
from disagg.api.http import reply
from disagg.api.http.metrics import ApiMetrics
from disagg.api.served_model import ServedModel
from disagg.api.service import Caller
from disagg.config import HttpConfig
from disagg.text import chat_template
from disagg.text.chat_template import ChatTemplate
from tests.api.apps import URL, Exchange, http_client, make_app, never, until
from tests.api.fakes import FakeGenerate, served_model
from tests.api.test_service import service
from tests.contract.contract import CHAT
from tests.text.test_chat_template import ENDLESS


def status(exchange: Exchange) -> int:
    (start,) = (each for each in exchange.sent if each["type"] == "http.response.start")
    code: int = start["status"]
    return code


def headers(exchange: Exchange) -> dict[bytes, bytes]:
    return dict(exchange.sent[0]["headers"])


@pytest.mark.parametrize(
    ("fields", "deadline_unix_s"),
    [({}, 1058.0), ({"timeout": 5}, 1003.0), ({"timeout": 1e9}, 1058.0), ({"timeout": 0.5}, 998.5)],
)
async def test_the_clock_runs_from_arrival_and_clients_may_ask_for_less_time(
    fields: dict[str, Any], deadline_unix_s: float
) -> None:
    """The clock of this service says 1000, its limit is 60 s, and the body took 2 s."""
    body = json.dumps(CHAT | fields).encode()
    run = await service().prepare(apis.CHAT, body, Caller("id", waited_s=2.0))
    assert run.requests[0].deadline_unix_s == deadline_unix_s


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """A model whose template never ends."""
    monkeypatch.setattr(chat_template, "PROBE_LIMIT_S", 0.01)  # of what it is asked when it is made
    monkeypatch.setattr(prompts, "INLINE_S", 0.001)
    return served_model(name="endless", template=ENDLESS)


async def test_a_template_that_takes_for_ever_is_refused_and_holds_nobody_up(
    endless: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of its own, which says that its time is over when another request is answered."""
    now_s, elsewhere = 0.0, threading.Event()

    def timer() -> float:
        nonlocal now_s
        if threading.current_thread() is threading.main_thread():
            now_s += 0.01  # which is all that is spent on a prompt there
        else:
            elsewhere.set()
        return now_s

    assert endless.template is not None
    monkeypatch.setattr(endless.template._environment, "_timer", timer)
    monkeypatch.setattr(prompts, "RENDER_LIMIT_S", 1.0)
    generate = FakeGenerate()
    app = make_app(generate, endless, served_model())
    async with http_client(app) as client:
        slow = asyncio.create_task(client.post(URL, json=CHAT | {"model": "endless"}))
        await until(elsewhere.is_set)
        quick = await client.post(URL, json=CHAT | {"model": "tiny"})
        assert quick.status_code == 200
        assert not slow.done(), "it had the event loop for itself"
        now_s += 2.0
        refused = await slow
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_prompt")
    assert "takes longer than 1 s" in refused.json()["error"]["message"]
    assert [request.model for request in generate.requests] == ["tiny"]


async def test_a_deadline_ends_the_wait_for_a_prompt(
    endless: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread then has a limit of its own."""
    monkeypatch.setattr(prompts, "RENDER_LIMIT_S", 0.5)
    async with http_client(make_app(None, endless)) as client:
        answer = await client.post(URL, json=CHAT | {"model": "endless", "timeout": 0.05})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_client_that_leaves_while_its_prompt_is_read_is_nobodys_request() -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Held(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            reading.set()
            assert go_on.wait(120)
            return super().render(*args, **options)

    generate, metrics = FakeGenerate(), ApiMetrics()
    model = served_model()
    object.__setattr__(model, "template", Held("{{ messages[0].content }}", {}))
    app = make_app(generate, model, metrics=metrics)
    # So many messages go to a thread.
    body = CHAT | {"messages": [{"role": "user", "content": "a"}] * 140}
    exchange = Exchange(app, body | {"model": "tiny"})
    await until(reading.is_set)
    exchange.hang_up()
    await exchange.done
    go_on.set()
    assert (generate.requests, exchange.sent) == ([], [])
    assert "disagg_requests_body_bytes 0.0" in metrics.expose().decode()


def parts_of(exchange: Exchange, *parts: bytes) -> None:
    """What arrives of a body instead of the whole."""
    exchange._incoming.get_nowait()
    for part in parts:
        exchange._incoming.put_nowait({"type": "http.request", "body": part, "more_body": True})


async def test_a_body_that_does_not_come_is_given_up() -> None:
    generate = FakeGenerate()
    exchange = Exchange(make_app(generate, config=HttpConfig(default_timeout_s=0.02)), CHAT)
    parts_of(exchange, b"{")
    await exchange.done
    assert (status(exchange), generate.requests) == (408, [])


async def test_bodies_have_a_room_of_so_many_bytes() -> None:
    """It counts what has arrived, whether announced or not, until the request is over."""
    metrics = ApiMetrics()
    config = HttpConfig(max_requests_nbytes=2000)
    generate = FakeGenerate(pause=never)
    app = make_app(generate, config=config, metrics=metrics)

    def shown(name: str) -> float:
        lines = metrics.expose().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    num_tasks = shown("disagg_event_loop_tasks")
    served = Exchange(app, CHAT)
    num_served = len(json.dumps(CHAT))
    await until(lambda: generate.num_open == 1)
    reading = Exchange(app, CHAT)
    parts_of(reading, b"x" * (1999 - num_served))
    await until(lambda: shown("disagg_requests_body_bytes") == 1999)
    assert shown("disagg_event_loop_tasks") > num_tasks
    late = Exchange(app, CHAT)
    parts_of(late, b"x", b"x")
    await late.done
    assert status(late) == 429
    assert int(headers(late)[b"retry-after"]) >= 1
    async with http_client(app) as client:
        announced = await client.post(URL, json=CHAT)
    assert announced.status_code == 429
    assert shown("disagg_request_refused_total") == 2
    assert shown("disagg_requests_body_bytes") == 1999
    for exchange in (served, reading):
        exchange.hang_up()
        await exchange.done
    assert shown("disagg_requests_body_bytes") == 0
    assert shown("disagg_num_requests_running") == 0
    assert shown("disagg_event_loop_tasks") == num_tasks


@pytest.mark.parametrize("body", [CHAT, CHAT | {"n": 0}], ids=["answer", "refusal"])
async def test_a_whole_reply_that_nobody_reads_is_given_up(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "PING_AFTER_S", 0.01)
    generate = FakeGenerate()
    exchange = Exchange(make_app(generate), body, stops_at=lambda message: "body" in message)
    await exchange.done
    assert (generate.num_open, len(exchange.sent)) == (0, 2)


async def test_a_silent_stream_that_takes_no_ping_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply, "PING_AFTER_S", 0.01)
    pauses = iter(range(100))
    generate = FakeGenerate(
        pause=lambda: asyncio.ensure_future(asyncio.sleep(0)) if next(pauses) < 1 else never()
    )
    exchange = Exchange(
        make_app(generate),
        CHAT | {"stream": True},
        stops_at=lambda message: b": ping" in message.get("body", b""),
    )
    await exchange.done
    assert generate.num_open == 0
