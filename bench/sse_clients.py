"""Clients that read server-sent events from raw sockets, so that they take little CPU."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

END_OF_BODY = b"0\r\n\r\n"  # of a chunked reply


class Clients:
    """`num_streams` connections, each with one streaming request after the other.

    Args:
        path, body: what is asked; `prompt` gets a number of its own in front each time.
        marker: text of one token; tokens are counted by it.
    """

    def __init__(self, port: int, path: str, body: dict[str, Any], marker: str) -> None:
        self.num_tokens = 0
        self.num_ended = 0
        self.first_token_s: list[float] = []  # waits
        self.failure = ""
        self.marker = marker.encode()
        self._port = port
        self._path = path
        self._body = body
        self._num_requests = 0
        self._connections: list[_Connection] = []

    async def start(self, num_streams: int, over_s: float) -> None:
        """Open all connections, spread over `over_s` seconds."""
        loop = asyncio.get_running_loop()
        for _ in range(num_streams):
            _, connection = await loop.create_connection(
                lambda: _Connection(self), "127.0.0.1", self._port
            )
            self._connections.append(connection)
            await asyncio.sleep(over_s / num_streams)

    async def wait_first_tokens(self, timeout_s: float) -> None:
        """Until every connection has had a token."""
        async with asyncio.timeout(timeout_s):
            while not all(each.has_token for each in self._connections):
                self.check()
                await asyncio.sleep(0.05)

    def check(self) -> None:
        if self.failure:
            raise SystemExit(self.failure)

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()

    def request(self) -> bytes:
        self._num_requests += 1
        prompt = f"{self._num_requests} {self._body['prompt']}"
        body = json.dumps({**self._body, "prompt": prompt}).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, clients: Clients) -> None:
        self.has_token = False
        self._clients = clients
        self._transport: asyncio.Transport | None = None
        self._asked_s = 0.0
        self._waits = False  # for the first token of a request

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, chunk: bytes) -> None:
        clients = self._clients
        num_tokens = chunk.count(clients.marker)
        if num_tokens:
            clients.num_tokens += num_tokens
            if self._waits:
                self._waits = False
                self.has_token = True
                clients.first_token_s.append(time.perf_counter() - self._asked_s)
        elif self._waits and not chunk.startswith(b"HTTP/1.1 200"):
            clients.failure = chunk[:500].decode(errors="replace")
        if chunk.endswith(END_OF_BODY):
            clients.num_ended += 1
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._clients.failure = f"a connection was closed: {error}"

    def _ask(self) -> None:
        if self._transport is not None:
            self._waits = True
            self._asked_s = time.perf_counter()
            self._transport.write(self._clients.request())
