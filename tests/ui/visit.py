"""The application behind a port that can go away, and a page in a browser that looks at it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from playwright.async_api import Browser, ConsoleMessage, Page

from disagg import local
from disagg.config import EngineConfig, HttpConfig, PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from tests.tiny_model import tiny_parts

ENGINE = EngineConfig(dtype="float32", num_threads=1, num_gpu_blocks_override=1024)
LONG = "a prompt with so many blocks that it is prefilled elsewhere: " * 4


class Server:
    """HTTP in front of a fleet; it may end and begin again on its port."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.port = 0
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def begin(self) -> None:
        app = self.cluster.ingress.app
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="critical"))
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def end(self) -> None:
        """Cut all connections, as when its process dies."""
        assert self._server is not None and self._task is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = True
        await self._task


def tiny_config(*models: Path, num_decode: int = 1, **http: Any) -> ServeConfig:
    tiers = tuple(
        TierConfig(
            model=str(model),
            engine=ENGINE,
            prefill=PoolConfig(num_replicas=1),
            decode=PoolConfig(num_replicas=num_decode),
            ttft_slo_s=None,
        )
        for model in models
    )
    return ServeConfig(tiers=tiers, transport="local", cluster_key="key", http=HttpConfig(**http))


@contextlib.asynccontextmanager
async def served(config: ServeConfig, build: Any = None) -> AsyncIterator[Server]:
    async with local.running(config, build) as cluster:
        server = Server(cluster)
        await server.begin()
        yield server
        await server.end()


def served_tiny(*models: Path, **options: Any) -> contextlib.AbstractAsyncContextManager[Server]:
    return served(tiny_config(*models, **options), tiny_parts())


@contextlib.asynccontextmanager
async def visited(browser: Browser, server: Server, **options: Any) -> AsyncIterator[Page]:
    """A page without an error in its console, which would also be a breach of its policy.

    Args:
        options: of the browser's context, and `expected`, a part of errors that belong to a test.
    """
    expected = options.pop("expected", None)
    said: list[str] = []
    context = await browser.new_context(**options)
    page = await context.new_page()

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: said.append(str(error)))
    await page.goto(f"{server.url}/")
    yield page
    await context.close()
    assert [each for each in said if expected is None or expected not in each] == []
