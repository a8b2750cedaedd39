"""Streams answers from a server, with the time at which each of their events was read."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from disagg.batch.over_http import open_session
from disagg.server_address import Address
from disagg.tools.server import RefusedReply, StreamChunk, Usage

_chunk = msgspec.json.Decoder(StreamChunk)
_refusal = msgspec.json.Decoder(RefusedReply)


class RequestTiming(msgspec.Struct, kw_only=True):
    """What happened to one request. Times are seconds from the beginning of the run.

    due_s: when the schedule wanted it to be sent; `sent_s` is later if the generator was late, or
        if the largest number of requests was in flight.
    event_s: when the first event with a text came, and when each after it with tokens.
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
    """One path of a server, asked over connections that are kept open. Create it in an event loop.

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
        self._url = address.root + path
        self._now = now
        self._timeout_s = timeout_s
        self._session = open_session(address, api_key, timeout_s)

    async def ask(self, body: bytes, timing: RequestTiming) -> str:
        """Send a request and fill in its timing. Returns the text of the answer."""
        timing.sent_s = self._now()
        pieces: list[str] = []
        try:
            try:
                await self._exchange(body, timing, pieces)
            except aiohttp.ClientConnectionError:  # it may have been closed while it was idle
                if timing.event_s:
                    raise
                await self._exchange(body, timing, pieces)
        except TimeoutError:
            _fail(timing, "timeout", f"no complete answer in {self._timeout_s:g} s")
        except aiohttp.ClientPayloadError:
            _fail(timing, "broken stream", "the connection ended before the answer did")
        except (aiohttp.ClientResponseError, msgspec.MsgspecError) as error:
            _fail(timing, "invalid answer", str(error))
        except (aiohttp.ClientError, OSError) as error:
            _fail(timing, "connection failed", str(error))
        if not timing.error and not timing.event_s:
            if not timing.num_output_tokens:
                _fail(timing, "empty answer", "the answer has no tokens")
            timing.event_s.append(self._now())  # none of its tokens has a text
        timing.num_output_tokens = timing.num_output_tokens or len(timing.event_s)
        return "".join(pieces)

    async def close(self) -> None:
        await self._session.close()

    async def _exchange(self, body: bytes, timing: RequestTiming, pieces: list[str]) -> None:
        async with self._session.post(self._url, data=body) as reply:
            if reply.status != 200:
                return _fail(timing, *_refused(reply.status, await reply.read()))
            rest, event = b"", b""
            async for data in reply.content.iter_any():
                read_s = self._now()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        event = line[5:].strip()
                        if event != b"[DONE]":
                            pieces += _read(event, read_s, timing)
            if event != b"[DONE]":
                _fail(timing, "broken stream", "the answer ended without [DONE]")


def _read(event: bytes, read_s: float, timing: RequestTiming) -> list[str]:
    """Note what an event says. Returns the pieces of the answer's text in it."""
    chunk = _chunk.decode(event)
    if chunk.error is not None:
        error = chunk.error
        _fail(timing, f"stream: {error.code or error.type or 'error'}", error.message)
    timing.id = timing.id or chunk.id
    if chunk.usage is not None:
        _count(timing, chunk.usage)
    # Once there is a text, tokens without one, such as those of an ignored end, count too.
    if chunk.choices and (timing.event_s or any(choice.has_output for choice in chunk.choices)):
        timing.event_s.append(read_s)
    return [choice.text or choice.delta.content or "" for choice in chunk.choices]


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
