"""The HTTP port of an ingress, as Serve starts it: where it listens, the heads it awaits, and how
parts of a stream are written at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from disagg.api.http.reply import WRITE_NOW
from disagg.app import haproxy_launcher, replica_port
from tests.links.fakes import until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own import

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"


HELD: list[asyncio.Event] = []
TOO_SLOW: list[int] = []  # how many parts of a stream were written before one had to wait


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's body, when all of it is there.

    `/slow`: when its event of `HELD` is set; `/hold`: never. `/stream`: answers with `stream`.
    """
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    while scope["path"] == "/hold" and message["type"] != "http.disconnect":
        message = await receive()
    if scope["path"] == "/slow":
        HELD.append(asyncio.Event())
        await HELD[-1].wait()
    if scope["path"] == "/stream":
        await stream(scope["extensions"][WRITE_NOW], send)
        return
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def stream(extension: Any, send: Any) -> None:
    """Writes the numbers from 0 on, one a line, until a write has to wait, and then one more."""
    assert extension["loop"] is asyncio.get_running_loop()
    write_now = extension["write"]
    assert not write_now(b"early"), "the reply has not begun"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    number = 0
    while write_now(b"%d%b\n" % (number, b" " * 10_000)):
        number += 1
        await asyncio.sleep(0)
    TOO_SLOW.append(number)
    last = {"type": "http.response.body", "body": b"%d\n" % number}
    await send({**last, "more_body": True})  # waits for the client
    assert write_now(b"now"), "the client reads again"
    await send({"type": "http.response.body"})
    assert not write_now(b"late"), "the next reply of this connection is not its own"


@pytest.fixture
async def address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[tuple[str, int]]:
    """Where Serve's own server listens that was asked to listen everywhere."""
    from ray.serve._private.http_util import start_asgi_http_server
    from ray.serve.config import HTTPOptions

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.3")
    monkeypatch.setenv(haproxy_launcher.SOCKETS, str(tmp_path))
    (tmp_path / "0.sock").touch()  # as one that died leaves it
    start = partial(replica_port._start_http, start_asgi_http_server)
    options = HTTPOptions(host="0.0.0.0", port=0)
    task, server = await start(echo, options, event_loop=asyncio.get_running_loop())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    await task


async def talk(address: tuple[str, int], *parts: bytes) -> bytes:
    """What comes back until the other side closes."""
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)
    found = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            found = await reader.read()
    writer.close()
    return found


async def test_it_listens_on_the_address_of_its_node(address: tuple[str, int]) -> None:
    assert address[0] == "127.0.0.3"
    close = b"Connection: close\r\n\r\n"
    answer = await talk(address, HEAD + close + b"body")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nbody")


async def test_it_listens_on_a_socket_of_its_machine(
    address: tuple[str, int], tmp_path: Path
) -> None:
    reader, writer = await asyncio.open_unix_connection(tmp_path / "0.sock")
    writer.write(HEAD + b"Connection: close\r\n\r\nbody")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nbody")


def test_a_socket_that_cannot_be_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert replica_port._bound(str(tmp_path / "nowhere" / "0.sock")) is None
    assert "by TCP" in caplog.text


@pytest.mark.parametrize(("before", "head"), [(b"", b""), (b"", HEAD), (HEAD + b"\r\nbody", HEAD)])
async def test_a_head_that_does_not_end_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, before: bytes, head: bytes
) -> None:
    """The first of a connection, and one after an answer. A body may take longer."""
    monkeypatch.setattr(replica_port, "HEAD_S", 0.5)
    answer = await talk(address, *([before] if before else []), head)
    assert answer.count(b"HTTP/1.1 200") == bool(before)
    slow = await talk(address, HEAD + b"Connection: close\r\n\r\n", b"bo", *[b""] * 12, b"dy")
    assert slow.endswith(b"\r\n\r\nbody")


async def test_a_head_that_is_too_long_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_port, "HEAD_S", 600.0)
    monkeypatch.setattr(replica_port, "MAX_HEAD_NBYTES", 4096)
    line = b"x-much: " + b"a" * 1000 + b"\r\n"
    assert await talk(address, HEAD, *[line] * 5) == b""
    whole = await talk(address, HEAD, *[line] * 3, b"Connection: close\r\n\r\nbody")
    assert whole.endswith(b"\r\n\r\nbody")


async def test_a_head_behind_a_running_answer_is_no_longer_than_others(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_port, "MAX_HEAD_NBYTES", 4096)
    line = b"x-much: " + b"a" * 1000 + b"\r\n"
    body = [b"a" * 2000] * 4
    assert await talk(address, _LONG % b"/hold", *body, HEAD, *[line] * 5) == b""
    last = b"Connection: close\r\n\r\nbody"
    answers = await talk(address, _LONG % b"/", *body, HEAD, *[line] * 3, last)
    assert answers.count(b"HTTP/1.1 200") == 2, "a body is no head"


async def test_a_line_end_behind_a_body_is_no_head(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody")
    await until(lambda: HELD)
    with monkeypatch.context() as impatient:
        impatient.setattr(replica_port, "HEAD_S", 0.1)
        writer.write(b"\r\n")
        await asyncio.sleep(0.5)
    writer.write(HEAD + b"Connection: close\r\n\r\nbody")
    HELD.pop().set()
    async with asyncio.timeout(60):
        answers = await reader.read()
    writer.close()
    assert answers.count(b"HTTP/1.1 200") == 2


async def test_parts_of_a_stream_are_written_at_once_until_the_client_is_too_slow(
    address: tuple[str, int],
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody")
    await until(lambda: TOO_SLOW)
    num_at_once = TOO_SLOW.pop()
    chunks = []
    async with asyncio.timeout(60):
        assert b"transfer-encoding: chunked" in await reader.readuntil(b"\r\n\r\n")
        while nbytes := int(await reader.readline(), 16):
            chunks.append(await reader.readexactly(nbytes))
            await reader.readexactly(2)
        writer.write(HEAD + b"Connection: close\r\n\r\nbody")
        assert (await reader.read()).endswith(b"\r\n\r\nbody")
    writer.close()
    *numbers, last = chunks
    assert last == b"now" and num_at_once > 0
    assert list(map(int, numbers)) == list(range(num_at_once + 1))


async def test_what_a_request_held_goes_with_its_connection(address: tuple[str, int]) -> None:
    """And does not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        assert await talk(address, HEAD + b"Connection: close\r\n\r\nbody")
        for _ in range(2000):  # tasks may end after the last byte has come
            left = [each for each in gc.get_objects() if isinstance(each, RequestResponseCycle)]
            if not left:
                break
            await asyncio.sleep(0.01)
    finally:
        gc.enable()
    assert not left


_LONG = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 8000\r\n\r\n"
