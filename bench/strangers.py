"""Measures how long a client with a key waits while clients without one hold connections.

    python -m bench.strangers [--seconds 10] [--tiny]

The real HTTP application with simulated workers runs behind HAProxy, configured by Serve and by
`disagg serve` (`app/haproxy_launcher.py`). The strangers, clients without a key, open and keep as
many connections as the case says. They send half of the headers, or headers and then a byte of the
body per second, or nothing. A connection that is closed is opened again at once. Meanwhile a client
with a key, from an address of its own, sends a request every 100 ms over a new connection.
`answered` is the number of requests with an answer. `worst s` is the longest time until an answer,
or LIMIT_S if there was none. The goal is GOAL_S.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from bench.report import finish, print_table
from disagg.api.http.app import AsgiApp, HttpApp, Readiness, Scope
from disagg.api.http.reply import Receive, Send
from disagg.api.service import Service
from disagg.app.haproxy import find_haproxy
from disagg.app.haproxy_launcher import adapted
from disagg.cli.ports import free_port
from disagg.config import HttpConfig
from tests.api.fakes import FakeGenerate, served_model
from tests.app.test_haproxy import serve_config

GOAL_S = 1.0
LIMIT_S = 5.0  # the good client waits no longer
PERIOD_S = 0.1
NUM_STARTS = 3  # of an HAProxy, one of whose free ports another program may take first
SETTLE_S = 2.0  # after the strangers have come
GOOD, STRANGERS = "127.0.0.2", "127.0.1."  # where they come from
BODY = b'{"prompt":"hi","max_tokens":1}'
KEY = "key-of-this-bench"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NUM_PROXY_CONNECTIONS = {"Serve's HAProxy": 4096, "ours": 7795}  # Serve's default; 20,000 files


class Case(NamedTuple):
    name: str
    number: int
    num_addresses: int
    opening: bytes
    drip: bytes = b""  # a second


CASES: tuple[Case, ...] = (
    Case("nobody", 0, 1, b""),
    Case("half-open heads", 4300, 1, HEAD[:20]),
    Case("half-open heads, 50 addresses", 6000, 50, HEAD[:20]),
    Case("slow bodies", 4300, 1, HEAD + b"Content-Length: 100000\r\n\r\n", b"a"),
    Case("idle connections", 10_000, 1, b""),
    Case("idle connections, 50 addresses", 6000, 50, b""),
)


class Strangers:
    """Connections that are kept as their case says."""

    def __init__(self, case: Case, port: int) -> None:
        self._case = case
        self._port = port
        self._held: list[socket.socket] = []
        self.num_cut = 0

    async def come(self) -> None:
        for number in range(self._case.number):
            self._held.append(await self._connect(number))

    async def stay(self) -> None:
        while True:
            began_s = time.monotonic()
            for number, each in enumerate(self._held):
                if not self._is_open(each):
                    self.num_cut += 1
                    each.close()
                    self._held[number] = await self._connect(number)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, began_s + 1.0 - time.monotonic()))

    def leave(self) -> None:
        for each in self._held:
            each.close()

    @property
    def num_held(self) -> int:
        return sum(map(self._is_open, self._held))

    async def _connect(self, number: int) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        made.bind((f"{STRANGERS}{1 + number % self._case.num_addresses}", 0))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.02):  # the backlog may be full
                await loop.sock_connect(made, ("127.0.0.1", self._port))
                await loop.sock_sendall(made, self._case.opening)
        return made

    def _is_open(self, connection: socket.socket) -> bool:
        try:
            if self._case.drip:
                connection.send(self._case.drip)
            return connection.recv(65536) == b"?"  # whatever comes is a refusal
        except BlockingIOError:
            return True
        except OSError:
            return False


async def ask(port: int) -> float | None:
    """Seconds until the whole answer; None: there was none."""
    began_s = time.monotonic()
    own = b"Authorization: Bearer %s\r\nConnection: close\r\n" % KEY.encode()
    own += b"Content-Length: %d\r\n\r\n" % len(BODY)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(GOOD, 0))
            writer.write(HEAD + own + BODY)
            answer = await reader.read()
            writer.close()
            if b"HTTP/1.1 200" in answer[:20]:
                return time.monotonic() - began_s
    return None


async def run(case: Case, port: int, seconds: float) -> dict[str, Any]:
    strangers = Strangers(case, port)
    await strangers.come()
    staying = asyncio.create_task(strangers.stay())
    await asyncio.sleep(min(SETTLE_S, seconds) if case.number else 0.0)
    asked: list[asyncio.Task[float | None]] = []
    for _ in range(int(seconds / PERIOD_S)):
        asked.append(asyncio.create_task(ask(port)))
        await asyncio.sleep(PERIOD_S)
    num_held = strangers.num_held
    took_s = await asyncio.gather(*asked)
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)
    strangers.leave()
    return {
        "strangers": case.name,
        "wanted": case.number,
        "held": num_held,
        "cut": strangers.num_cut,
        "asked": len(took_s),
        "answered": sum(each is not None for each in took_s),
        "worst s": max(LIMIT_S if each is None else each for each in took_s),
    }


def with_health(app: AsgiApp) -> AsgiApp:
    """As in Serve, which answers HAProxy's health checks before the application."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/-/healthz":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"success"})
        else:
            await app(scope, receive, send)

    return served


@asynccontextmanager
async def application() -> AsyncIterator[int]:
    """Its port."""
    model = served_model()
    service = Service({model.name: model}, FakeGenerate())
    app = HttpApp(service, HttpConfig(api_key=KEY), readiness=lambda: Readiness(ready=True))
    server = uvicorn.Server(
        uvicorn.Config(with_health(app), port=0, log_level="error", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    await serving


@asynccontextmanager
async def proxy(name: str, backend: int) -> AsyncIterator[int]:
    """The port of an HAProxy in front of the application."""
    number = NUM_PROXY_CONNECTIONS[name]
    for _ in range(NUM_STARTS):
        port = free_port()
        with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
            files = Path(directory)
            text = serve_config(files, port, backend, free_port())
            config = files / "haproxy.cfg"
            config.write_text(adapted(text, "127.0.0.1", "", number) if name == "ours" else text)
            process = subprocess.Popen(  # noqa: ASYNC220
                [find_haproxy(), "-db", "-f", str(config)], stderr=subprocess.DEVNULL
            )
            while process.poll() is None:
                if await ask(port) is not None:
                    yield port
                    process.kill()
                    process.wait()
                    return
    raise SystemExit("HAProxy did not start.")


async def measure(cases: tuple[Case, ...], seconds: float) -> list[dict[str, Any]]:
    rows = []
    for name in NUM_PROXY_CONNECTIONS:
        for case in cases:  # each with a fresh HAProxy: what an earlier one held would count
            async with application() as backend, proxy(name, backend) as port:
                rows.append({"proxy": name, **await run(case, port, seconds)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cases, seconds = CASES, arguments.seconds
    if arguments.tiny:
        cases, seconds = tuple(each._replace(number=each.number // 100) for each in CASES), 0.3
    rows = asyncio.run(measure(cases, seconds))
    print_table(rows)
    late = [row["strangers"] for row in rows if row["proxy"] == "ours" and row["worst s"] > GOAL_S]
    finish("strangers", rows, goal_s=GOAL_S, above=late)


if __name__ == "__main__":
    main()
