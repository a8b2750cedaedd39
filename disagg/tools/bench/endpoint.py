"""Streams answers from a server, with the time at which each of their events came.

A connection is an `asyncio.Protocol`: an event has the time at which its bytes were read, not that
at which some task woke up, and costs the client some microseconds.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import httptools
import msgspec

from disagg.server_address import Address
from disagg.tools.server import RefusedReply, StreamChunk, Usage

_chunk = msgspec.json.Decoder(StreamChunk)
_refusal = msgspec.json.Decoder(RefusedReply)


class RequestTiming(msgspec.Struct, kw_only=True):
    """What happened to one request. Times are seconds from the beginning of the run.

    due_s: when the schedule wanted it to be sent; `sent_s` is later if the generator was late, or
        if the largest number of requests was in flight.
    event_s: when each event with a part of the answer came.
    num_output_tokens: as the server counts; the number of events if it does not say.
    id: what the server calls it.
    error: its kind, such as "429 overloaded"; "" if it was answered.
    """

    due_s: float
    sent_s: float = 0.0
    event_s: list[float] = []
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    id: str = ""
    error: str = ""
    message: str = ""

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.due_s

    @property
    def e2el_s(self) -> float:
        return self.event_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first one; 0 if there is none."""
        return (self.event_s[-1] - self.event_s[0]) / max(1, self.num_output_tokens - 1)

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.due_s


class Endpoint:
    """One path of a server, asked over connections that are kept open.

    Args:
        now: seconds since the beginning of the run.
    """

    def __init__(
        self,
        address: Address,
        path: str,
        *,
        now: Callable[[], float],
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._address = address
        self._now = now
        self._timeout_s = timeout_s
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[ClientConnection] = []
        lines = [
            f"POST {address.prefix}{path} HTTP/1.1",
            f"Host: {address.netloc}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
            "Content-Length: ",
        ]
        self._head = "\r\n".join(lines).encode()

    async def ask(self, body: bytes, timing: RequestTiming) -> str:
        """Send a request and fill in its timing. Returns the text of the answer."""
        timing.sent_s = self._now()
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        connection: ClientConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    is_reused = bool(self._idle)
                    connection = self._idle.pop() if is_reused else await self._connect()
                    try:
                        await connection.exchange(request, timing)
                        break
                    except ConnectionResetError:  # it may have been closed while it was idle
                        if not is_reused:
                            raise
        except TimeoutError:
            _fail(timing, "timeout", f"no complete answer in {self._timeout_s:g} s")
        except OSError as error:
            _fail(timing, "connection failed", str(error))
        finally:
            if connection is not None:
                self._keep(connection)
        if not timing.error and not timing.event_s:
            if not timing.num_output_tokens:
                _fail(timing, "empty answer", "the answer has no tokens")
            timing.event_s.append(self._now())  # none of its tokens has a text
        timing.num_output_tokens = timing.num_output_tokens or len(timing.event_s)
        return connection.text if connection is not None else ""

    def close(self) -> None:
        for each in self._idle:
            each.close()

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        host, port = self._address.host, self._address.port
        _, connection = await loop.create_connection(
            lambda: ClientConnection(self._now), host, port, ssl=self._ssl
        )
        return connection

    def _keep(self, connection: ClientConnection) -> None:
        if connection.may_be_reused:
            self._idle.append(connection)
        else:
            connection.close()


class ClientConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.may_be_reused = False
        self.text = ""
        self._now = now
        self._transport: asyncio.WriteTransport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._timing = RequestTiming(due_s=0.0)

    async def exchange(self, request: bytes, timing: RequestTiming) -> None:
        """Send a request; returns when its answer has ended.

        Raises:
            ConnectionResetError: the connection ended before the answer began.
        """
        self._timing = timing
        self.may_be_reused = self._has_answer = False
        self._ended = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[str] = []
        self._rest = b""  # of a line, or the body of an error
        self._is_done = False
        if self._transport is None:
            self.connection_lost(None)
        else:
            self._transport.write(request)
        await self._ended
        self.text = "".join(self._pieces)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._has_answer = True
        if self._ended is None or self._ended.done():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            cause = error.__context__ or error
            self._end("invalid answer", str(cause) or type(cause).__name__)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self.may_be_reused = None, False
        if self._ended is not None and not self._ended.done():
            if self._is_done:  # the answer's end is that of the connection
                self._end()
            elif self._has_answer:
                self._end("broken stream", "the connection ended before the answer did")
            else:
                cause = str(error or "closed without an answer")
                self._ended.set_exception(ConnectionResetError(cause))

    # What the parser calls.

    def on_body(self, body: bytes) -> None:
        self._rest += body
        if self._parser.get_status_code() != 200:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip())

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self.may_be_reused = self._parser.should_keep_alive()
        if status != 200:
            self._end(*_refused(status, self._rest))
        elif self._is_done:
            self._end()
        else:
            self._end("broken stream", "the answer ended without [DONE]")

    def _read_event(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._is_done = True
            return
        chunk, timing = _chunk.decode(event), self._timing
        if chunk.error is not None:
            error = chunk.error
            self._end(f"stream: {error.code or error.type or 'error'}", error.message)
        timing.id = timing.id or chunk.id
        if any(choice.has_output for choice in chunk.choices):
            timing.event_s.append(self._now())
            self._pieces += [choice.text or choice.delta.content or "" for choice in chunk.choices]
        if chunk.usage is not None:
            _count(timing, chunk.usage)

    def _end(self, error: str = "", message: str = "") -> None:
        if error:
            _fail(self._timing, error, message)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


def _count(timing: RequestTiming, usage: Usage) -> None:
    timing.num_prompt_tokens = usage.prompt_tokens
    timing.num_output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    timing.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0


def _refused(status: int, body: bytes) -> tuple[str, str]:
    """The kind of an error, and what the server says."""
    try:
        error = _refusal.decode(body).error
    except msgspec.MsgspecError:
        return str(status), body[:200].decode(errors="replace")
    return f"{status} {error.code or error.type or ''}".strip(), error.message


def _fail(timing: RequestTiming, error: str, message: str) -> None:
    timing.error, timing.message = timing.error or error, timing.message or message
