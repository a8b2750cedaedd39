"""HTTP in front: keys, paths, headers, bodies, limits, and what the smaller endpoints say."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import uvicorn

from disagg.api.http import request
from disagg.api.http.app import AsgiApp, Readiness
from disagg.api.http.metrics import ApiMetrics
from disagg.api.http.monitoring import Monitoring
from disagg.api.http.reply import WRITE_NOW
from disagg.api.running_job import RunningJob
from disagg.config import HttpConfig
from tests.api.apps import URL, Exchange, http_client, make_app, never, until
from tests.api.fakes import FakeGenerate, served_model
from tests.contract.contract import CHAT

PART = {"type": "http.response.body", "more_body": True}
OPEN = ["/health", "/live", "/ready", "/ping", "/version", "/metrics"]
KEYED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/debug/requests/1"),
    ("GET", "/nope"),
    ("DELETE", "/v1/models"),
]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_reply_says_whose_tokens_stand(is_stream: bool) -> None:
    model = replace(served_model(), deferral="tokens of small stand within 0.3")
    async with http_client(make_app(None, model)) as client:
        reply = await client.post(URL, json={**CHAT, "stream": is_stream})
    assert reply.headers["x-disagg-cascade"] == "tokens of small stand within 0.3"


async def test_keys_are_asked_for_everywhere_but_where_probes_look() -> None:
    app = make_app(config=HttpConfig(api_key="secret"))
    async with http_client(app) as client:
        for path in OPEN:
            assert (await client.get(path)).status_code == 200
        for method, path in KEYED:
            reply = await client.request(method, path, json=CHAT)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for good in ("Bearer secret", "bearer secret"):
            reply = await client.get("/v1/models", headers={"authorization": good})
            assert reply.status_code == 200


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({f"x-{i}": "1" for i in range(200)}, 431, "headers_too_large"),
        ({"content-type": "application/json; charset=utf-8"}, 200, None),
        ({"host": "[::1]:8000"}, 200, None),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_headers(headers: dict[str, str], status: int, code: str | None) -> None:
    async with http_client(make_app()) as client:
        reply = await client.post(
            URL, content=json.dumps(CHAT), headers={"content-type": "application/json"} | headers
        )
    assert reply.status_code == status, reply.text
    assert reply.json().get("error", {}).get("code") == code


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-1.2:3_4", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("tcp://evil:1", False),
        ("a b", False),
        ("", False),
    ],
)
async def test_request_ids_are_labels(given: str, kept: bool) -> None:
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        reply = await client.post(URL, json=CHAT, headers={"x-request-id": given})
    assert (reply.headers["x-request-id"] == given) == kept
    assert generate.requests[0].request_id == reply.json()["id"] == "chatcmpl-id1"


async def test_a_host_that_names_replies_is_left_to_it() -> None:
    """Such as Serve, which sends an `x-request-id` of its own with every reply."""
    async with http_client(make_app(names_replies=False)) as client:
        for path in ("/v1/models", "/live", "/nowhere"):
            assert "x-request-id" not in (await client.get(path)).headers


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", False),
        ("nonsense", False),
    ],
)
async def test_trace_parents_travel_when_they_are_well_formed(given: str, kept: bool) -> None:
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        await client.post(URL, json=CHAT, headers={"traceparent": given})
    assert generate.requests[0].traceparent == (given if kept else "")


async def test_body_limit_is_exact() -> None:
    body = json.dumps(CHAT).encode()
    for spare, status in ((0, 200), (-1, 413)):
        app = make_app(config=HttpConfig(max_body_nbytes=len(body) + spare))
        async with http_client(app) as client:
            reply = await client.post(
                URL, content=body, headers={"content-type": "application/json"}
            )
            assert reply.status_code == status


async def test_too_many_at_once_are_refused_and_come_again() -> None:
    generate = FakeGenerate(pause=never)
    app = make_app(generate, config=HttpConfig(max_num_requests=1))
    first = Exchange(app, CHAT)
    await until(lambda: generate.num_open == 1)
    async with http_client(app) as client:
        refused = await client.post(URL, json=CHAT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.get("/live")).status_code == 200
        first.hang_up()
        await first.done
        generate.pause = None
        assert (await client.post(URL, json=CHAT)).status_code == 200


async def test_probes_say_what_there_is() -> None:
    app = make_app(readiness=lambda: Readiness(ready=False, reason="no decode worker"))
    async with http_client(app) as client:
        for path in ("/ready", "/health"):
            reply = await client.get(path)
            assert reply.status_code == 503
            assert reply.json()["reason"] == "no decode worker"
        assert (await client.get("/live")).status_code == 200
        assert (await client.head("/live")).status_code == 200


async def test_models_and_version() -> None:
    async with http_client(make_app()) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        one = (await client.get("/v1/models/tiny")).json()
        assert one == listed["data"][0]
        assert (one["id"], one["max_model_len"], one["object"]) == ("tiny", 512, "model")
        assert (await client.get("/version")).json()["version"]


async def test_a_model_is_also_served_under_the_name_that_vllm_would_give_it() -> None:
    full = replace(served_model(), full_name="org/tiny")
    async with http_client(make_app(None, full, served_model("other"))) as client:
        one, other = (await client.get("/v1/models")).json()["data"]
        assert (one["id"], one["root"], other["root"]) == ("tiny", "org/tiny", "other")
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            assert (await client.get(path)).json() == one
        reply = await client.post("/v1/chat/completions", json=CHAT | {"model": "org/tiny"})
        assert reply.json()["model"] == "tiny"
        reply = await client.post("/v1/chat/completions", json=CHAT | {"model": ""})
        assert reply.status_code == 404


async def test_tokenize_and_back() -> None:
    async with http_client(make_app()) as client:
        text = "the quick <|im_end|> 😀"
        found = (await client.post("/tokenize", json={"prompt": text})).json()
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
        back = await client.post("/detokenize", json={"tokens": found["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (
            await client.post(
                "/tokenize", json={"messages": CHAT["messages"], "return_token_strs": True}
            )
        ).json()
        assert chat["token_strs"][0] == "<|im_start|>"
        assert (await client.post("/tokenize", json={})).status_code == 400
        of_chats = {"continue_final_message": True, "chat_template_kwargs": {"a": 1}}
        again = await client.post("/tokenize", json={"prompt": text} | of_chats)
        assert again.json() == found
        for special in (True, False):
            fields = {"prompt": text, "add_special_tokens": special}
            assert (await client.post("/tokenize", json=fields)).json() == found
        for wrong in ([-1], [2**40], [1.5], [10**6]):
            assert (await client.post("/detokenize", json={"tokens": wrong})).status_code == 400


async def test_decisions_are_shown_where_they_are_kept() -> None:
    known = {"chatcmpl-id1": b'{"tier":"tiny"}'}
    monitoring = Monitoring(ApiMetrics(), explain=lambda name, tenant: known.get(name))
    async with http_client(make_app(monitoring=monitoring)) as client:
        answer = (await client.post(URL, json=CHAT)).json()
        reply = await client.get(f"/debug/requests/{answer['id']}")
        assert reply.json() == {"tier": "tiny"}
        assert (await client.get("/debug/requests/other")).status_code == 404


async def test_metrics_count_what_happened() -> None:
    generate = FakeGenerate(num_cached_tokens=4)
    async with http_client(make_app(generate)) as client:
        await client.post(URL, json=CHAT | {"max_tokens": 50})
        await client.post(URL, json=CHAT | {"stream": True})
        await client.post(URL, json={})
        text = (await client.get("/metrics")).text
    for line in (
        'disagg_request_success_total{finish_reason="stop",model_name="tiny"} 1.0',
        'disagg_request_success_total{finish_reason="length",model_name="tiny"} 1.0',
        'disagg_cached_prompt_tokens_total{model_name="tiny",tenant="default"} 8.0',
        'disagg_generation_tokens_total{model_name="tiny",tenant="default"} 9.0',
        'disagg_time_to_first_token_seconds_count{model_name="tiny"} 2.0',
        'disagg_http_requests_total{code="200",route="/v1/chat/completions"} 2.0',
        'disagg_http_requests_total{code="400",route="/v1/chat/completions"} 1.0',
    ):
        assert line in text.splitlines()


async def test_lifespan_and_websockets_are_answered() -> None:
    app = make_app()
    for scope, incoming, expected in (
        ("lifespan", ["lifespan.startup", "lifespan.shutdown"],
         ["lifespan.startup.complete", "lifespan.shutdown.complete"]),
        ("websocket", ["websocket.connect"], ["websocket.close"]),
    ):  # fmt: skip
        messages = iter([{"type": kind} for kind in incoming])
        sent: list[str] = []

        async def receive(
            messages: Any = messages,
        ) -> MutableMapping[str, Any]:
            return dict(next(messages))

        async def send(message: MutableMapping[str, Any], sent: list[str] = sent) -> None:
            sent.append(message["type"])

        await app({"type": scope}, receive, send)
        assert sent == expected


# Over real sockets


@asynccontextmanager
async def served(app: AsgiApp) -> AsyncIterator[int]:
    """The app under uvicorn on a free port."""
    config = uvicorn.Config(app, port=0, log_level="error")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def _raw(port: int, head: str, body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply


async def test_over_sockets() -> None:
    generate = FakeGenerate(pause=lambda: asyncio.ensure_future(asyncio.sleep(0.01)), finish=False)
    app = make_app(generate, config=HttpConfig(max_body_nbytes=1000))
    post = f"POST {URL} HTTP/1.1\nHost: a\nContent-Type: application/json\n"
    async with served(app) as port:
        chunk = b"400\r\n" + b"a" * 1024 + b"\r\n"
        reply = await _raw(port, post + "Transfer-Encoding: chunked", chunk * 2)
        assert reply.startswith(b"HTTP/1.1 413"), reply
        reply = await _raw(port, post + "Content-Length: 5000", b"a")
        assert reply.startswith(b"HTTP/1.1 413"), reply
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request, "BODY_TIMEOUT_S", 0.05)
            reply = await _raw(port, post + "Content-Length: 500", b"a")
        assert reply.startswith(b"HTTP/1.1 408"), reply
        for wrong in ("Content-Length: abc", "Content-Length: -1"):
            reply = await _raw(port, post + wrong)
            assert reply.startswith(b"HTTP/1.1 400"), reply
        reply = await _raw(port, "GET /live HTTP/1.1\nConnection: close")
        assert reply.startswith(b"HTTP/1.1 400"), reply
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            body = CHAT | {"stream": True, "max_tokens": 400}
            async with client.stream("POST", URL, json=body) as stream:
                lines = stream.aiter_lines()
                while "quick" not in await anext(lines):
                    assert generate.num_open == 1
        await until(lambda: generate.num_open == 0)  # the client has closed its socket


def content_of(body: str) -> str:
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events)


@pytest.mark.parametrize("client", ["fast", "slow", "sometimes slow", "on another loop"])
async def test_events_are_the_same_whichever_way_tokens_come(client: str) -> None:
    """Also for a client that makes each write wait, and through the server's `WRITE_NOW`."""
    written_now: list[bytes] = []
    asked_now: list[bool] = []

    def served_to(app: AsgiApp) -> AsgiApp:
        async def served(scope: Any, receive: Any, send: Any) -> None:
            async def send_later(message: Any) -> None:
                await asyncio.sleep(0.001)
                await send(message)

            def write_now(body: bytes) -> bool:
                if not body:
                    asked_now.append(True)
                    return len(asked_now) % 3 > 0
                written_now.append(body)
                with pytest.raises(StopIteration):
                    send({**PART, "body": body}).send(None)
                return True

            if client == "sometimes slow":
                loop = asyncio.get_running_loop()
                scope["extensions"] = {WRITE_NOW: {"loop": loop, "write": write_now}}
            elif client == "on another loop":
                scope["extensions"] = {WRITE_NOW: {"loop": object(), "write": write_now}}
            await app(scope, receive, send_later if client == "slow" else send)

        return served

    bodies = []
    for serve in (lambda app: app, served_to):
        generate = FakeGenerate("the quick brown fox jumps " * 3)
        async with http_client(serve(make_app(generate))) as http:
            reply = await http.post(URL, json=CHAT | {"stream": True, "max_tokens": 50})
        bodies.append(reply.text)
    if client == "slow":  # whose tokens leave together
        bodies = [content_of(body) for body in bodies]
    assert bodies[0] == bodies[1]
    assert bool(written_now) == (client == "sometimes slow")


async def test_what_a_stream_held_goes_with_its_end() -> None:
    """And does not wait for the garbage collector: a prompt can be megabytes."""

    def runs() -> list[RunningJob]:
        return [each for each in gc.get_objects() if isinstance(each, RunningJob)]

    gc.collect()
    gc.disable()
    before = runs()  # those in tracebacks of exceptions that are parameters of other tests
    try:
        async with http_client(make_app(FakeGenerate())) as client:
            await client.post(URL, json=CHAT | {"stream": True})
        for _ in range(10):  # of the loop, in which tasks end
            await asyncio.sleep(0)
        assert not [each for each in runs() if each not in before]
    finally:
        gc.enable()
