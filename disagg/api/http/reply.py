"""Writes one reply, as a whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from disagg.api.apis import error_body
from disagg.api.http.metrics import RequestTimer
from disagg.api.http.request import HttpRequest
from disagg.api.openai.answers import PING
from disagg.api.refusals import error_headers
from disagg.api.running_job import ChoiceDelta, Frames, RunningJob
from disagg.config import AUTO
from disagg.errors import DisaggError

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# An ASGI extension of our server (`app/replica_port.py`): its `loop`, and `write`, which writes a
# part of a streamed body at once. Ray Serve and uvicorn would run four coroutines for each part,
# which do nothing else. False: it has written nothing and would not, because the reply has not
# begun or has ended, or because the client reads too slowly or has gone. An empty part asks that.
WRITE_NOW = "disagg.write_now"

# A stream that is silent for this long gets a comment, so that proxies do not time out. A stream
# whose client reads nothing for this long is closed.
PING_AFTER_S = 15.0
JSON = (b"content-type", b"application/json")
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [JSON])


class Stream(NamedTuple):
    """A streamed reply.

    Attributes:
        events: yields events to write; it may also write some itself with `Writer.write_now`.
        error: makes the last event of a stream that fails.
        headers: of the reply; a stream of events is kept alive while it is silent.
    """

    events: Callable[[Writer], AsyncGenerator[bytes, None]]
    error: Callable[[DisaggError], bytes]
    headers: list[tuple[bytes, bytes]] = EVENT_STREAM


class Writer:
    """Writes one reply, and knows how much of it is written.

    Args:
        headers: sent with every reply, also with errors.
        extensions: the ASGI extensions of the server.
    """

    def __init__(
        self, send: Send, headers: Sequence[tuple[bytes, bytes]], extensions: Mapping[str, Any]
    ) -> None:
        self._send = send
        self._write_now: Callable[[bytes], bool] | None = None
        extension = extensions.get(WRITE_NOW)
        # Serve may run the application on another loop than its server.
        if extension is not None and extension["loop"] is asyncio.get_running_loop():
            self._write_now = extension["write"]
        self._headers = headers
        self.status: int | None = None
        self.streaming: Stream | None = None  # the stream that has begun and not ended
        self.num_begun = 0  # writes that have begun; more than `num_written` while one blocks
        self.num_written = 0

    async def reply(self, reply: Reply) -> None:
        length = (b"content-length", str(len(reply.body)).encode())
        await self._start(reply.status, [*reply.headers, length])
        await self.write(reply.body, more=False)

    async def stream(self, stream: Stream) -> None:
        """Write a stream. The reply starts with its first event, so earlier errors get a status."""
        async with aclosing(stream.events(self)) as events:
            async for event in events:
                if not self.streaming:
                    await self._start(200, stream.headers)
                    self.streaming = stream
                await self.write(event)
        self.streaming = None
        await self.write(b"", more=False)

    async def fail(self, error: DisaggError, path: str, *, close: bool) -> None:
        """Write an error reply for `path`, or the last event of a stream that has begun."""
        if self.streaming:
            event = self.streaming.error(error)
            self.streaming = None
            await self.write(event, more=False)
        elif self.status is None:
            closing = [(b"connection", b"close")] if close else []
            headers = [JSON, *error_headers(error), *closing]
            await self.reply(Reply(error_body(error, path), error.http_status, headers))

    async def write(self, body: bytes, *, more: bool = True) -> None:
        self.num_begun += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self.num_written += 1

    def write_now(self, body: bytes) -> bool:
        """Write at once, if the client reads fast enough. Returns whether it did, or would."""
        if self._write_now is None or not self._write_now(body):
            return False
        self.num_begun += bool(body)
        self.num_written += bool(body)
        return True

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self._headers],
            }
        )


async def watch(request: HttpRequest, writer: Writer) -> None:
    """Return when the client has disconnected or stopped reading; keep a silent stream alive."""
    gone = asyncio.create_task(request.wait_disconnect())
    try:
        while True:
            before = writer.num_begun, writer.num_written
            done, _ = await asyncio.wait({gone}, timeout=PING_AFTER_S)
            if done:
                return
            if before != (writer.num_begun, writer.num_written):
                continue
            if writer.num_begun > writer.num_written:
                return  # a write has been blocked for the whole time
            if writer.streaming and writer.streaming.headers is EVENT_STREAM:
                async with asyncio.timeout(PING_AFTER_S):
                    await writer.write(PING)
    except TimeoutError:
        return
    finally:
        gone.cancel()


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Answer the ASGI lifespan events of the server."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def stream_events(
    run: RunningJob,
    frames: Frames,
    timer: RequestTimer,
    begins: Callable[[], None],
    writer: Writer,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer, those of one batch as one bytes object.

    Once the reply has begun, a piece that arrives alone is written to the connection at once, if
    the client reads fast enough, and not yielded.

    Args:
        begins: called before the first event.
    """

    def write_now(piece: ChoiceDelta) -> bool:
        if not writer.write_now(b""):
            return False
        timer.observe_piece(piece)
        return writer.write_now(frames.piece(piece))

    has_begun, is_named = False, run.model.name != AUTO
    try:
        async with aclosing(run.batches()) as batches:
            with timer:
                async for batch in batches:
                    timer.observe(batch)
                    if not is_named:
                        is_named = frames.name_models()
                    opening = b""
                    if not has_begun:
                        has_begun = True
                        begins()
                        opening = frames.opening()
                    events = opening + b"".join(map(frames.piece, batch))
                    if events:
                        yield events
                        run.write_now = write_now
    finally:
        run.write_now = None  # breaks the reference cycle of callback and run
    yield frames.closing()
