"""Streaming completions over HTTP, read from raw sockets so that the client takes little CPU."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.peers.checkpoint import WORD
from bench.peers.children import NotRunning
from bench.peers.limits import MODEL
from bench.sse_clients import END_OF_BODY

TIMEOUT_S = 600.0


@dataclass
class Stream:
    """One answer: when it was asked for, and when each token of it came (perf_counter)."""

    asked_s: float
    token_s: list[float] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    was_moved: bool = False  # to another worker after its first token, as far as it is known

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.asked_s

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


async def complete(
    port: int, prompt: list[int], num_new: int, extra: Mapping[str, Any] | None = None
) -> Stream:
    """Ask for a completion and read it to its end.

    Raises:
        NotRunning: the answer has not `num_new` tokens; says what came instead.
    """
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": " ".join(f"{WORD}{token}" for token in prompt),
            "max_tokens": num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **(extra or {}),
        }
    ).encode()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stream = Stream(time.perf_counter())
    transport, _ = await loop.create_connection(lambda: _Reader(stream, ended), "127.0.0.1", port)
    transport.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    try:
        await asyncio.wait_for(ended, TIMEOUT_S)
    finally:
        transport.close()
    if len(stream.token_s) != num_new:
        words = stream.received[-400:].decode(errors="replace")
        raise NotRunning(f"{len(stream.token_s)} tokens instead of {num_new}: {words!r}")
    return stream


class _Reader(asyncio.Protocol):
    def __init__(self, stream: Stream, ended: asyncio.Future[None]) -> None:
        self._stream = stream
        self._ended = ended

    def data_received(self, chunk: bytes) -> None:
        stream = self._stream
        stream.token_s += [time.perf_counter()] * chunk.count(WORD.encode())
        stream.received += chunk
        if stream.received.endswith(END_OF_BODY) and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
