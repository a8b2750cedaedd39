"""A worker as a Ray Serve replica. Serve places and drains it; requests arrive over its link."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from typing import ClassVar

import msgspec
import ray
from ray import serve

from disagg import logs, telemetry
from disagg.app import membership, start_board
from disagg.app.rank_actors import RankActors
from disagg.app.replica_port import bind_to_node
from disagg.app.worker_environment import environment_of, with_threads
from disagg.config import ServeConfig
from disagg.devices import see_only
from disagg.messages import Role, StartStep
from disagg.worker.parts import Parts, build_parts
from disagg.worker.start import start_worker


class WorkerReplica:
    """Runs one worker. Its methods only control the worker; no request passes through them."""

    # Builds the parts of the worker; a benchmark replaces it.
    build_parts: ClassVar[Callable[..., Parts]] = staticmethod(build_parts)

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServeConfig, tier_name: str, role: Role
    ) -> None:
        num_nodes = sum(node["Alive"] for node in ray.nodes())
        tier = with_threads(config, config.tier(tier_name), role, num_nodes)
        os.environ.update(environment_of(tier, role))  # before torch is imported
        bind_to_node()
        self._drain_s = config.drain_s
        replica = serve.get_replica_context().replica_id.unique_id
        logs.setup(f"{tier_name}-{role}-{replica}")
        telemetry.setup(f"disagg-{role}", {"disagg.worker": replica})
        see_only(ray.get_gpu_ids())
        tell = start_board.reporter(f"{tier_name}-{role}", replica)
        host = config.link_host or ray.util.get_node_ip_address()
        build = functools.partial(self.build_parts, progress=tell)
        engine = tier.for_role(role).engine
        if engine.nnodes > 1:
            is_on_gpu = bool(ray.get_gpu_ids())
            nodes = RankActors(host, engine.nnodes, is_on_gpu=is_on_gpu)
            build = functools.partial(build, nodes=nodes)
        self._worker = await start_worker(
            msgspec.structs.replace(config, link_host=host),
            tier,
            role,
            worker_id=f"{tier_name}-{role}-{replica}",
            epoch=time.time_ns(),
            host=host,
            build=build,
        )
        tell(StartStep("ready"))
        gc.freeze()  # garbage collection then skips these long-lived objects and delays no step

    def record_replica_metadata(self) -> dict[str, str]:
        return membership.to_metadata(self._worker.record)

    async def check_health(self) -> None:
        self._worker.check_health()

    async def __del__(self) -> None:
        await self._worker.drain(self._drain_s)
        telemetry.shutdown()
