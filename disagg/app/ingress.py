"""The root deployment: a Serve replica that runs an `IngressCore` and gives it the membership."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from disagg import logs, telemetry
from disagg.api.http.app import AsgiApp
from disagg.api.http.monitoring import ask_nobody
from disagg.app import membership, private_ray
from disagg.app.autoscaling import is_scaled, last_decisions
from disagg.app.haproxy import read_metrics
from disagg.app.replica_port import bind_to_node, node_of_replica
from disagg.config import ServeConfig
from disagg.ingress.core import IngressCore
from disagg.ingress.fleet_state import PERIOD_S
from disagg.messages import WorkerRecord

READY_WAIT_S = 30.0
OTHERS_WAIT_S = 1.0

log = logging.getLogger(__name__)


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
        self._replica = replica
        self._others: Any = None  # a handle of the ingresses, when they were asked once
        several = config.num_ingress > 1
        self._core = IngressCore(
            config,
            replica,
            beside=functools.partial(read_metrics, node_of_replica() if several else ""),
            ask_others=self._ask_others if several else ask_nobody,
            names_replies=False,
        )
        self._loop = asyncio.get_running_loop()
        self._following = asyncio.create_task(self._follow_scaling()) if is_scaled(config) else None
        membership.subscribe(self._membership_changed)
        for pool in pools:
            private_ray.subscribe(pool)  # to the membership
        # Serve sends traffic when this returns. The wait has a limit: an ingress without workers
        # still answers with a clear error.
        await self._core.wait_ready(READY_WAIT_S)
        gc.freeze()  # garbage collection then skips these long-lived objects and delays no stream

    async def _follow_scaling(self) -> None:
        """Show the autoscaler's decisions, which it makes in Serve's controller."""
        application = serve.get_replica_context().app_name
        while True:
            try:
                self._core.state.scaling = await asyncio.to_thread(last_decisions, application)
            except Exception:
                log.exception("The autoscaler's decisions cannot be read.")
            await asyncio.sleep(PERIOD_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        load: dict[str, float] = self._core.load()
        return load

    def __serve_build_asgi_app__(self) -> AsgiApp:
        return self._core.app

    def _membership_changed(self, records: list[WorkerRecord]) -> None:
        """Called from Serve's router thread."""
        self._loop.call_soon_threadsafe(self._core.update, records)

    async def _ask_others(self, method: str, *args: Any) -> list[Any]:
        """See `Monitoring`. Those that are gone or slow do not count."""
        try:
            if self._others is None:
                name = serve.get_replica_context().app_name
                self._others = await asyncio.to_thread(private_ray.broadcaster_of, name)
            answers = await private_ray.ask_all(
                self._others, "answer", self._replica, method, *args, timeout_s=OTHERS_WAIT_S
            )
        except Exception as error:  # nobody is there, or Serve says in some way that it cannot
            log.warning("Cannot ask the other ingresses: %r", error)
            return []
        return [each for asked, each in answers if asked != self._replica]

    async def answer(self, asker: str, method: str, *args: Any) -> tuple[str, Any]:
        """The id of this ingress and what a method of its `Monitoring` returns, for another one."""
        found = None if asker == self._replica else getattr(self._core.monitoring, method)(*args)
        return self._replica, found if found is None else await found

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Call `HttpApp.drain`."""
        return await self._core.app.drain(timeout_s)

    async def serve_again(self) -> None:
        """Call `HttpApp.serve_again`: whoever called `drain` has changed their mind."""
        self._core.app.serve_again()

    async def __del__(self) -> None:
        membership.unsubscribe(self._membership_changed)
        if self._following is not None:
            self._following.cancel()
        await self._core.close()
        telemetry.shutdown()
