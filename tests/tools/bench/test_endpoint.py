"""What is read of a stream, at times that the test sets, and of servers that break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from disagg.server_address import address_of
from disagg.tools.bench.endpoint import Endpoint, RequestTiming

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(**fields: Any) -> bytes:
    data = b"data: %b\n\n" % json.dumps({"id": "chatcmpl-1", **fields}).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def delta(**fields: str) -> bytes:
    return event(choices=[{"delta": fields}])


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def read(*parts: tuple[float, bytes], is_timed: bool) -> tuple[RequestTiming, str]:
    """What comes of a server that sends `parts`, each when the clock says so, and hangs up.

    Args:
        is_timed: each part is sent when the client has read the one before and looked at the clock.
    """
    clock, looked = [0.0], asyncio.Event()

    def now() -> float:
        looked.set()
        return clock[0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for time_s, data in parts:
            looked.clear()
            clock[0] = time_s
            writer.write(data)
            if is_timed:
                await asyncio.wait_for(looked.wait(), 60)

    async with asking(serve, now) as endpoint:
        timing = RequestTiming(due_s=0.5)
        return timing, await endpoint.ask(b"{}", timing)


@asynccontextmanager
async def asking(serve: Any, now: Callable[[], float]) -> AsyncIterator[Endpoint]:
    """An endpoint whose connections are each served by `serve`, and then closed."""
    serving = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoint = Endpoint(address_of(url), "/v1/chat/completions", now=now)
        yield endpoint
        await endpoint.close()
    await asyncio.gather(*filter(None, serving))


async def test_every_part_has_the_time_at_which_it_was_read() -> None:
    first, second = delta(content="a b"), delta(content=" c")
    timing, text = await read(
        (1.0, HEAD + delta(role="assistant")),  # says nothing yet
        (1.5, delta(reasoning_content="hm")),
        (2.0, first + second[:9]),
        (2.5, second[9:] + delta(content=" d")),
        (3.0, event(choices=[{"text": "!"}])),
        (4.0, delta(content="") + USAGE + DONE),  # a token without a text
        is_timed=True,
    )
    assert timing == RequestTiming(
        due_s=0.5,
        event_s=[1.5, 2.0, 2.5, 2.5, 3.0, 4.0],
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_output_tokens=5,
        id="chatcmpl-1",
    )
    assert (timing.ttft_s, timing.e2el_s, timing.tpot_s) == (1.0, 3.5, 0.625)
    assert text == "a b c d!"


REFUSAL = json.dumps({"error": {"message": "too late", "code": "overloaded"}}).encode()


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([HEAD + delta(content="a")], "broken stream", "before the answer did"),
        ([HEAD + delta(content="a") + b"0\r\n\r\n"], "broken stream", r"without \[DONE\]"),
        ([HEAD + event(error={"message": "lost", "code": "worker_lost"}) + DONE],
         "stream: worker_lost", "lost"),
        ([b"HTTP/1.1 429 No\r\nContent-Length: %d\r\n\r\n" % len(REFUSAL), REFUSAL],
         "429 overloaded", "too late"),
        ([b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops"], "502", "oops"),
        ([HEAD + b"8\r\ndata: {\n\r\n"], "invalid answer", "truncated"),
        ([b"SSH-2.0-OpenSSH_9.9\r\n"], "invalid answer", "HTTP"),
    ],
)  # fmt: skip
async def test_a_stream_that_breaks_says_how(parts: list[bytes], kind: str, message: str) -> None:
    timing, _ = await read(*((1.0, part) for part in parts), is_timed=False)
    assert timing.error == kind
    assert re.search(message, timing.message), timing.message


async def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    num_answers, asked = iter([1, 2]), []  # of each connection

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(next(num_answers, 0)):
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1][:1])))
            writer.write(HEAD + delta(content="a") + DONE)

    timings = [RequestTiming(due_s=0.0) for _ in range(4)]
    async with asking(serve, lambda: 0.0) as endpoint:
        for timing in timings:
            await endpoint.ask(b"{}", timing)
    assert [each.error for each in timings] == ["", "", "", "connection failed"]
    assert asked == [b"{}"] * 3
