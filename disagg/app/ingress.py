"""The root deployment: a Serve replica that runs an `IngressCore` and gives it the membership."""

from __future__ import annotations

import asyncio
import gc

from ray import serve
from ray.serve.handle import DeploymentHandle

from disagg import logs, telemetry
from disagg.api.http.app import AsgiApp
from disagg.app import membership, private_ray
from disagg.app.haproxy import read_metrics
from disagg.app.replica_port import bind_to_node
from disagg.config import ServeConfig
from disagg.ingress.core import IngressCore
from disagg.messages import WorkerRecord

READY_WAIT_S = 30.0


class Ingress:
    """Serves HTTP requests. Serve runs its HTTP server around the ASGI app of this class.

    Args:
        pools: one handle per worker pool. They make Serve send the membership of the pools to this
            process; no request goes through them.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServeConfig, *pools: DeploymentHandle
    ) -> None:
        bind_to_node()
        replica = serve.get_replica_context().replica_id.unique_id
        logs.setup(f"ingress-{replica}")
        telemetry.setup("disagg-ingress", {"disagg.ingress": replica})
        # Serve's middleware already sends `x-request-id` with every reply.
        self._core = IngressCore(config, replica, beside=read_metrics, names_replies=False)
        self._loop = asyncio.get_running_loop()
        membership.subscribe(self._membership_changed)
        for pool in pools:
            private_ray.subscribe(pool)  # to the membership
        # Serve sends traffic when this returns. The wait has a limit: an ingress without workers
        # still answers with a clear error.
        await self._core.wait_ready(READY_WAIT_S)
        gc.freeze()  # garbage collection then skips these long-lived objects and delays no stream

    def record_autoscaling_stats(self) -> dict[str, float]:
        load: dict[str, float] = self._core.load()
        return load

    def __serve_build_asgi_app__(self) -> AsgiApp:
        return self._core.app

    def _membership_changed(self, records: list[WorkerRecord]) -> None:
        """Called from Serve's router thread."""
        self._loop.call_soon_threadsafe(self._core.update, records)

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Call `HttpApp.drain`."""
        return await self._core.app.drain(timeout_s)

    async def serve_again(self) -> None:
        """Call `HttpApp.serve_again`: whoever called `drain` has changed their mind."""
        self._core.app.serve_again()

    async def __del__(self) -> None:
        membership.unsubscribe(self._membership_changed)
        await self._core.close()
        telemetry.shutdown()
