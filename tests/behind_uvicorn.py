"""The whole application in this process, without Ray, for clients that speak HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn

from disagg import local
from disagg.config import ServeConfig
from disagg.config_checks import parse_config
from disagg.worker.parts import Parts

FLEET = parse_config(
    {
        "tiers": [{"model": "demo-small", "engine": {"num_threads": 1, "device": "cpu"}}],
        "cluster_key": "of-a-test",
        "transport": "local",
    }
)


@asynccontextmanager
async def served_port(
    config: ServeConfig, build: Callable[..., Parts] | None = None
) -> AsyncIterator[int]:
    """The port of an ingress and its workers, which `build` makes (`local.running`)."""
    async with local.running(config, build=build) as cluster:
        server = uvicorn.Server(uvicorn.Config(cluster.ingress.app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            port: int = server.servers[0].sockets[0].getsockname()[1]
            yield port
        finally:
            server.should_exit = True
            await serving
