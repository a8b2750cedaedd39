"""The whole system in one process, without Ray: the same ingress, links and workers.

For tests, debugging and offline use. Links are real loopback connections; engines have their own
threads; KV moves by the transport that the configuration names.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from disagg.api.http.in_process import ask_app
from disagg.batch.ask import BATCH_HEADERS
from disagg.batch.lines import BatchReply
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.ingress.core import IngressCore
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.messages import Role
from disagg.worker.parts import Parts, build_parts
from disagg.worker.start import start_worker
from disagg.worker.worker import Worker

POLL_S = 0.005
READY_TIMEOUT_S = 60.0


class LocalCluster:
    """Workers and an ingress on one event loop. Use `running`."""

    def __init__(self, config: ServeConfig, build: Callable[..., Parts]) -> None:
        self.config = config
        self.workers: list[Worker] = []
        self.ingress = IngressCore(config, "local")
        self._build = build

    async def start_worker(self, tier: TierConfig, role: Role) -> Worker:
        """One worker more; the ingress learns of it at once."""
        worker = await start_worker(
            self.config,
            tier,
            role,
            worker_id=f"{tier.name}-{role}-{secrets.token_hex(4)}",
            epoch=time.time_ns(),
            host="127.0.0.1",
            build=self._build,
        )
        self.workers.append(worker)
        self._update_members()
        return worker

    async def stop_worker(self, worker: Worker, drain_s: float | None = None) -> None:
        """Take a worker away; with `drain_s` its streams end, or go on elsewhere, first.

        As under Serve the ingress hears it before the worker does.
        """
        self.workers.remove(worker)
        if drain_s is None:
            await worker.close()
            self._update_members()
        else:
            self._update_members()
            await worker.drain(drain_s)

    async def post(self, path: str, body: bytes) -> BatchReply:
        """The reply to a request without SLOs to the ingress's HTTP application."""
        return await ask_app(self.ingress.app, path, body, BATCH_HEADERS)

    async def wait_ready(self) -> None:
        """Until every worker is known to the router."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while len(self.ingress.fleet.view().workers) < len(self.workers):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        await self.ingress.close()
        await asyncio.gather(*(worker.close() for worker in self.workers))

    def _update_members(self) -> None:
        self.ingress.update([worker.record for worker in self.workers])


@asynccontextmanager
async def running(
    config: ServeConfig, build: Callable[..., Parts] | None = None
) -> AsyncIterator[LocalCluster]:
    """A cluster with the workers that `config` asks for, ready to serve; closed at the end.

    Args:
        build: makes a worker's parts; tests give one with a fake model.

    Raises:
        StartupError: in words for the user.
    """
    config = _sharing_a_gpu(config)
    build = build or functools.partial(build_parts, local_fleet=LocalFleet())
    cluster = LocalCluster(config, build)
    try:
        for tier in config.tiers:
            for role, pool in tier.pools.items():
                for _ in range(pool.num_replicas):
                    await cluster.start_worker(tier, role)
        await cluster.wait_ready()
        yield cluster
    finally:
        await cluster.close()


def _sharing_a_gpu(config: ServeConfig) -> ServeConfig:
    """All engines of a process open the same device, so each claims its part of the memory."""
    pools = [pool for tier in config.tiers for pool in tier.pools.values()]
    share = 1.0 / max(1, sum(pool.num_replicas for pool in pools))

    def shared(pool: PoolConfig) -> PoolConfig:
        return pool if pool.num_gpus else msgspec.structs.replace(pool, num_gpus=share)

    tiers = tuple(
        msgspec.structs.replace(tier, prefill=shared(tier.prefill), decode=shared(tier.decode))
        for tier in config.tiers
    )
    return msgspec.structs.replace(config, tiers=tiers)
