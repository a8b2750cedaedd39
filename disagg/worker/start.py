"""Starts a worker with the engine that its tier names."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from disagg.config import ServeConfig, TierConfig
from disagg.messages import Role
from disagg.worker.parts import Parts
from disagg.worker.vllm.worker import VllmWorker
from disagg.worker.worker import Worker


async def start_worker(
    config: ServeConfig,
    tier: TierConfig,
    role: Role,
    *,
    worker_id: str,
    epoch: int,
    host: str,
    build: Callable[..., Parts],
) -> Worker:
    """Start a worker. The arguments are those of `Worker.start`; `build` is of our engine.

    One with vLLM has all that a replica calls: `record`, `check_health`, `drain` and `close`.

    Raises:
        StartupError: the worker cannot start.
    """
    if tier.engine.backend == "vllm":
        other = await VllmWorker.start(
            config, tier, role, worker_id=worker_id, epoch=epoch, host=host
        )
        return cast("Worker", other)
    return await Worker.start(
        config, tier, role, worker_id=worker_id, epoch=epoch, host=host, build=build
    )
