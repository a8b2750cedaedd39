"""The contract holds over raw sockets, for httpx and for OpenAI's client, on one server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import uvicorn

from disagg.config import HttpConfig
from tests.api.apps import make_app
from tests.api.fakes import FakeGenerate
from tests.contract.contract import CHAT, CHAT_URL, KEY, Row, codes, headers, rows

MAY_RETRY = (408, 409, 429)


class Served(NamedTuple):
    port: int
    generate: FakeGenerate
    httpx: httpx.Client
    openai: openai.OpenAI


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    generate = FakeGenerate()
    app = make_app(generate, config=HttpConfig(api_key=KEY))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = httpx.Client(trust_env=False)
    url = f"http://127.0.0.1:{port}/v1"
    with client, openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as library:
        yield Served(port, generate, client, library)
    server.should_exit = True
    thread.join()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def by_socket(port: int, row: Row) -> Answer:
    lines = [f"{row.method} {row.path} HTTP/1.1", "connection: close"]
    lines += [f"{name}: {value}" for name, value in row.headers.items()]
    if row.body or row.method == "POST":
        lines.append(f"content-length: {len(row.body)}")
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + row.body)
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    named = (field.split(": ", 1) for field in fields)
    return Answer(int(status.split()[1]), {name.lower(): value for name, value in named}, body)


def by_httpx(served: Served, row: Row) -> Answer:
    url = f"http://127.0.0.1:{served.port}{row.path}"
    reply = served.httpx.request(row.method, url, headers=row.headers, content=row.body)
    return Answer(reply.status_code, dict(reply.headers), reply.content)


def check(row: Row, answer: Answer) -> None:
    assert answer.status == row.status, answer.body[:500]
    error = json.loads(answer.body)["error"]
    assert (error["code"], error["param"]) == (row.code, row.param)
    assert set(error) == {"message", "type", "param", "code"}
    kind = "authentication_error" if row.status == 401 else "invalid_request_error"
    assert error["type"] == kind
    assert len(answer.body) < 2000
    assert answer.headers["x-request-id"]
    expected = None if row.status in MAY_RETRY else "false"
    assert answer.headers.get("x-should-retry") == expected
    if row.status == 405:
        assert answer.headers["allow"] in ("GET", "POST")
    if row.status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_wrong_request_is_refused(served: Served, row: Row) -> None:
    before = len(served.generate.requests)
    check(row, by_socket(served.port, row))
    check(row, by_httpx(served, row))
    if row.fields is not None:
        with pytest.raises(openai.APIStatusError) as refused:
            path = row.path.removeprefix("/v1")
            served.openai.post(path, body=row.fields, cast_to=object)
        error: Any = refused.value
        assert (error.status_code, error.code, error.param) == (row.status, row.code, row.param)
    assert len(served.generate.requests) == before, "refused before any work"


def test_a_good_request_is_served_after_all_of_them(served: Served) -> None:
    good = Row("", "POST", CHAT_URL, headers(), json.dumps(CHAT).encode(), 200, "", None)
    for answer in (by_socket(served.port, good), by_httpx(served, good)):
        assert answer.status == 200


def test_every_code_of_a_refusal_is_explained() -> None:
    assert {row.code: row.status for row in rows()}.items() <= {
        code: of["status"] for code, of in codes().items()
    }.items()
