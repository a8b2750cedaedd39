"""Starts a worker with the engine that its tier names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from disagg.config import ServeConfig, TierConfig
from disagg.messages import Role
from disagg.worker.parts import Parts
from disagg.worker.vllm.worker import VllmWorker
from disagg.worker.worker import Worker

AnyWorker: TypeAlias = Worker | VllmWorker


async def start_worker(
    config: ServeConfig,
    tier: TierConfig,
    role: Role,
    *,
    worker_id: str,
    epoch: int,
    host: str,
    build: Callable[..., Parts],
) -> AnyWorker:
    """Start a worker. The arguments are those of `Worker.start`; `build` is of our engine.

    Raises:
        StartupError: the worker cannot start.
    """
    if tier.engine.backend == "vllm":
        return await VllmWorker.start(
            config, tier, role, worker_id=worker_id, epoch=epoch, host=host
        )
    return await Worker.start(
        config, tier, role, worker_id=worker_id, epoch=epoch, host=host, build=build
    )
