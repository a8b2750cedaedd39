"""An ingress without its host: the API in front, the router in the middle, the links behind.

`app/` puts it into a Serve replica, `local.py` into a plain process; both tell it who the workers
are. Knows nothing of where membership comes from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from disagg.api.http import AsgiApp, Readiness, build_app
from disagg.api.metrics import ApiMetrics
from disagg.api.served_model import ServedModel
from disagg.api.service import Service
from disagg.config import ServeConfig, TierConfig
from disagg.links.fleet_links import FleetLinks
from disagg.messages import WorkerRecord
from disagg.router.dispatch import Dispatcher
from disagg.router.fleet import Fleet
from disagg.router.standby import Pool, Standby
from disagg.telemetry import FleetMetrics

# Until a worker says what it uses; nothing is routed before that.
PROVISIONAL_BLOCK_SIZE = 16
READY_POLL_S = 0.02


class IngressCore:
    """Everything of one ingress that outlives a request. Lives on one event loop.

    Args:
        ingress_id: shown to workers; unique among ingresses.
        now: Unix seconds.

    Raises:
        ModelError: a tier's directory lacks what the API needs.
    """

    def __init__(
        self, config: ServeConfig, ingress_id: str, *, now: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._ingress_id = ingress_id
        self._records: list[WorkerRecord] = []
        self._is_starting = True  # not all pools have been there yet
        self._models = {tier.name: _served_model(tier) for tier in config.tiers}
        rng = random.Random(ingress_id)
        self.fleet = Fleet()
        self.links = FleetLinks(
            key=config.cluster_key.encode(),
            ingress_id=ingress_id,
            observer=Standby(self.fleet, _num_serving(config)),
            rng=rng,
        )
        metrics = ApiMetrics()
        self._fleet_metrics = FleetMetrics(metrics.registry)
        self.dispatcher = Dispatcher(
            self.links,
            self.fleet,
            now=now,
            rng=rng,
            ttft_slo_s={tier.name: tier.ttft_slo_s for tier in config.tiers},
            moved=self._fleet_metrics.request_moved,
        )
        self.service = Service(
            self._models,
            self.dispatcher.generate,
            default_timeout_s=config.http.default_timeout_s,
            clock=now,
        )
        self.app: AsgiApp = build_app(
            self.service,
            config.http,
            readiness=self.readiness,
            metrics=metrics,
            explain=self._explain,
            refresh=self._refresh_metrics,
        )

    def update(self, records: Sequence[WorkerRecord]) -> None:
        """The workers there are now, all of them."""
        self._records = list(records)
        for record in records:
            model = self._models.get(record.model)
            if model is not None and _differs(model, record):
                self._models[record.model] = dataclasses.replace(
                    model, block_size=record.block_size, max_model_len=record.max_model_len
                )
        self.links.update(records)

    def readiness(self) -> Readiness:
        """Ready while every tier has a worker that takes requests: any of them can do it all.

        Not at first: before a worker of each pool was there once, requests are not let in.
        """
        workers = self.fleet.view().workers.values()
        pools = {}
        for tier in self._config.tiers:
            members = [w for w in workers if w.record.model == tier.name and w.accepting]
            pools[tier.name] = {
                "num_prefill": sum(w.record.role == "prefill" for w in members),
                "num_decode": sum(w.record.role == "decode" for w in members),
                "num_kv_blocks": sum(w.record.num_blocks for w in members),
                "block_size": self._models[tier.name].block_size,
            }
        lacking = [
            f"{tier.name}-{role}"
            for tier in self._config.tiers
            for role, pool in (("prefill", tier.prefill), ("decode", tier.decode))
            if pool.num_replicas and not pools[tier.name][f"num_{role}"]
        ]
        if not lacking:
            self._is_starting = False
        if not self._is_starting:
            lacking = [
                name for name, pool in pools.items() if not pool["num_prefill"] + pool["num_decode"]
            ]
        reason = f"no worker takes requests for {', '.join(lacking)}" if lacking else ""
        return Readiness(not lacking, reason, pools, self._ingress_id)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Until all pools are there, or for so long. Returns whether requests can be served."""
        deadline = time.monotonic() + timeout_s
        while not self.readiness().ready:
            if time.monotonic() >= deadline:
                self._is_starting = False  # a pool that is dead must not keep the others waiting
                return self.readiness().ready
            await asyncio.sleep(READY_POLL_S)
        return True

    async def close(self) -> None:
        await self.links.close()

    def _refresh_metrics(self) -> None:
        reports = self.fleet.reports()
        for record, status in reports:
            self._fleet_metrics.worker(
                record.model,
                record.role,
                record.worker_id,
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                kv_usage=1.0 - status.num_free_blocks / record.num_blocks,
                num_holds=status.num_holds,
                requests_nbytes=status.requests_nbytes,
                link_nbytes=self.links.num_buffered_bytes(record.worker_id),
            )
            if status.store is not None:
                counts = msgspec.structs.asdict(status.store)
                self._fleet_metrics.store(
                    record.model,
                    record.role,
                    record.worker_id,
                    {name.removeprefix("num_"): count for name, count in counts.items()},
                )
            for figure in status.transfers:
                self._fleet_metrics.transfer(
                    figure.source_id,
                    record.worker_id,
                    latency_s=figure.latency_s,
                    bytes_per_s=figure.bytes_per_s,
                )
        self._fleet_metrics.keep_only({record.worker_id for record, _ in reports})

    def _explain(self, request_id: str) -> bytes | None:
        decisions = self.dispatcher.decision(request_id)
        return msgspec.json.encode(decisions) if decisions else None


def _num_serving(config: ServeConfig) -> dict[Pool, int]:
    """Of the pools in which workers stand by."""
    numbers: dict[Pool, int] = {}
    for tier in config.tiers:
        if tier.prefill.num_standby:
            numbers[tier.name, "prefill"] = tier.prefill.num_replicas
        if tier.decode.num_standby:
            numbers[tier.name, "decode"] = tier.decode.num_replicas
    return numbers


def _served_model(tier: TierConfig) -> ServedModel:
    return ServedModel.from_directory(
        tier.directory,
        name=tier.name,
        block_size=tier.engine.block_size or PROVISIONAL_BLOCK_SIZE,
        max_model_len=tier.engine.max_model_len,
        chat_template=tier.chat_template,
        created_unix_s=int(time.time()),
    )


def _differs(model: ServedModel, record: WorkerRecord) -> bool:
    return (model.block_size, model.max_model_len) != (record.block_size, record.max_model_len)
