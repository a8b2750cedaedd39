"""One ingress: HTTP API, router and links to workers. It works with and without Ray.

`app/` runs it in a Serve replica, `local.py` in a plain process. Both call `update` with the list
of workers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from disagg.api.http.app import HttpApp, Readiness
from disagg.api.http.batches import BatchApi
from disagg.api.http.in_process import asking_for
from disagg.api.http.metrics import ApiMetrics
from disagg.api.http.monitoring import AskOthers, Monitoring, ask_nobody
from disagg.api.http.quota import Quota
from disagg.api.served_model import ServedModel, auto_model, check_one_language
from disagg.api.service import Service, hash_request
from disagg.api_keys import DEFAULT_TENANT
from disagg.batch.queue import BatchQueue
from disagg.batch.store import BatchStore
from disagg.config import AUTO, ServeConfig, TierConfig
from disagg.ingress.adapters import FleetAndAdapters, ServedAdapters
from disagg.ingress.admission_queue import AdmissionQueue
from disagg.ingress.decisions import Decision
from disagg.ingress.dispatch import Dispatcher
from disagg.ingress.escalation import Escalation
from disagg.ingress.fleet_metrics import FleetMetrics, LinkBuffers
from disagg.ingress.fleet_state import FleetState, add_fleets
from disagg.ingress.plan_requests import PlanRequests
from disagg.links.fleet_links import FleetLinks
from disagg.messages import GenerateRequest, PutDelta, WorkerRecord
from disagg.models.description import describe_foreign, describe_model
from disagg.router.autoscale import may_be_empty
from disagg.router.cascade import CascadeDecision
from disagg.router.fleet import Fleet
from disagg.router.load_report import report, sum_pools
from disagg.router.prefix_index import PrefixIndex
from disagg.store.limits import Limits, keep_in_step
from disagg.store.redis_store import RedisBoard

log = logging.getLogger(__name__)


# Used until a worker has reported its block size; nothing is routed before that.
PROVISIONAL_BLOCK_SIZE = 16
READY_POLL_S = 0.02
PRIORITY_WITHOUT_SLO = 1  # after requests with the default priority 0


class Explanation(msgspec.Struct):
    """The response of `GET /debug/requests/{id}`."""

    routes: tuple[Decision, ...]  # oldest first
    cascade: CascadeDecision | None


class IngressCore:
    """The parts of one ingress that outlive a request. They all run on one event loop.

    Args:
        ingress_id: id that workers see; unique among ingresses.
        now: returns Unix time in seconds.
        beside, ask_others: see `Monitoring`.
        names_replies: see `HttpApp`.

    Raises:
        ModelError: a file that the API needs is missing from a model's directory, or the tiers
            cannot form a cascade.
    """

    def __init__(
        self,
        config: ServeConfig,
        ingress_id: str,
        *,
        now: Callable[[], float] = time.time,
        beside: Callable[[], bytes] = bytes,
        ask_others: AskOthers = ask_nobody,
        names_replies: bool = True,
    ) -> None:
        self._config = config
        self._ingress_id = ingress_id
        self._may_be_empty = [tier.name for tier in config.tiers if may_be_empty(tier)]
        self._is_starting = True  # until each pool has had a worker once
        self._models = served_models(config)
        for tier in config.tiers:  # where `disagg serve` does not say so, as under KubeRay
            for sentence in self._models[tier.name].remarks:
                log.warning("%s", sentence)
        rng = random.Random(ingress_id)
        self._slo_s = {
            tier.name: (tier.ttft_limit_s, tier.tpot_slo_s or 0.0) for tier in config.tiers
        }
        tpot_slo_s = {tier.name: tier.tpot_slo_s for tier in config.tiers if tier.tpot_slo_s}
        index = PrefixIndex(config.prefix_index_nbytes)
        self.fleet = Fleet(index, now=now, tpot_slo_s=tpot_slo_s, ingress_id=ingress_id)
        adapters = ServedAdapters(
            config,
            self._models,
            lambda worker_id, message: self.links.tell_adapters(worker_id, message),
            now,
        )
        self.links = FleetLinks(
            key=config.cluster_key.encode(),
            ingress_id=ingress_id,
            observer=FleetAndAdapters(self.fleet, adapters),
            rng=rng,
        )
        metrics = self._metrics = ApiMetrics(
            ingress=ingress_id if config.num_ingress > 1 else "",
            slo_s={tier.name: (tier.ttft_limit_s, tier.tpot_goal_s) for tier in config.tiers},
            tenants={DEFAULT_TENANT, *config.tenants},
            models=[tier.name for tier in config.tiers],
        )
        self._index = index
        self._index_is_too_small = False
        limits = self._limits = Limits(config.tenant, clock=metrics.clock)
        for name, value in {
            "prefix_index_bytes": lambda: index.nbytes,
            "prefix_index_blocks": lambda: index.num_blocks,
            "prefix_index_max_blocks": lambda: index.max_num_blocks,
            "prefix_index_evicted_blocks": lambda: index.num_evicted,
            "tenant_limits_shared": lambda: limits.is_shared,
        }.items():
            metrics.of(name).set_function(value)
        metrics.registry.register(LinkBuffers(self.fleet.reports, self.links.num_buffered_bytes))
        pools = [(tier.name, role) for tier in config.tiers for role in tier.pools]
        metrics.of_fleet.register(FleetMetrics(self.fleet.reports, pools))
        self.admission_queue = AdmissionQueue(
            self.fleet,
            now=now,
            weight=lambda tenant: config.tenant(tenant).weight,
            max_nbytes=config.http.max_queue_nbytes,
            waited=self._observe_wait,
        )
        self.dispatcher = Dispatcher(
            self.links,
            self.fleet,
            now=now,
            rng=rng,
            metrics=metrics,
            admission_queue=self.admission_queue,
            wakes=self._may_be_empty,
        )
        self._escalation: Escalation | None = None
        if config.cascade is not None:
            self._escalation = Escalation(
                config.cascade,
                [tier.name for tier in config.tiers],
                generate=self._dispatch,
                rename=lambda request, model: hash_request(request, self._models[model]),
                now=now,
                decided=metrics.cascade_decided,
            )
        self.state = FleetState(
            config,
            ingress_id,
            metrics,
            self.dispatcher.demand,
            reports=self.fleet.reports,
            num_queued=lambda: self.fleet.view().queued,
            now=now,
        )
        self._sampling: asyncio.Task[None] | None = None
        self._sharing = self._share_limits()
        self.service = Service(
            self._models,
            self._generate,
            adapters=adapters,
            explain=self._cascade_decision,
            default_timeout_s=config.http.default_timeout_s,
            clock=now,
        )
        store = None
        if config.http.files_directory is not None:
            store = BatchStore(Path(config.http.files_directory), config.http.files_nbytes, now)
        self.monitoring = Monitoring(
            metrics,
            explain=self._explanation,
            show_fleet=self.state.show,
            add_fleets=add_fleets,
            refresh=self._refresh_queue,
            beside=beside,
            ask_others=ask_others,
        )
        self.app = HttpApp(
            self.service,
            config.http,
            readiness=self.readiness,
            metrics=metrics,
            monitoring=self.monitoring,
            quota=Quota(config.tenant, config.tenant_class, self._limits),
            planner=PlanRequests({tier.name: str(tier.directory) for tier in config.tiers}),
            secret=hmac.digest(config.cluster_key.encode(), b"sessions", "sha256"),
            names_replies=names_replies,
            batches=None if store is None else BatchApi(store, config.http, now),
        )
        self._batches = None
        if store is not None:
            ask_for = asking_for(self.app, now)
            self._batches = BatchQueue(store, ask_for, self._num_batch_requests, now)

    def update(self, records: Sequence[WorkerRecord]) -> None:
        """Set the complete list of workers."""
        for record in records:
            model = self._models.get(record.model)
            if model is not None and _differs(model, record):
                self._models[record.model] = dataclasses.replace(
                    model, block_size=record.block_size, max_model_len=record.max_model_len
                )
        self._models.update(_auto(self._config, self._models))
        self._check_index(sum(record.num_blocks for record in records))
        self.links.update(records)
        if self._sampling is None:
            self._sampling = asyncio.create_task(self.state.keep_sampling())

    def _check_index(self, num_blocks: int) -> None:
        """Warn if the prefix index is too small for the workers' blocks, once until it fits."""
        room, was_too_small = self._index.max_num_blocks, self._index_is_too_small
        self._index_is_too_small = num_blocks > room
        if self._index_is_too_small and not was_too_small:
            log.warning(
                "The workers have %d KV blocks in total, but the prefix index of an ingress has"
                " room for %d. Blocks that several workers cache count once, but if the index"
                " fills up, it forgets cached prefixes. Multiply prefix_index_nbytes by %.1f,"
                " or use larger blocks (block_size).",
                num_blocks,
                room,
                math.ceil(10 * num_blocks / room) / 10,
            )

    def readiness(self) -> Readiness:
        """Whether every tier has a worker that accepts requests or may be scaled to zero.

        One worker is enough, because any worker can prefill and decode. But during the start each
        pool that may not be scaled to zero must have had a worker once.
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
                "max_num_seqs": max((w.record.max_num_seqs for w in members), default=0),
                "max_num_batched_tokens": max(
                    (w.record.max_num_batched_tokens for w in members), default=0
                ),
            }
        lacking = [
            f"{tier.name}-{role}"
            for tier in self._config.tiers
            for role, pool in tier.pools.items()
            if (pool.autoscaling.min_replicas if pool.autoscaling else pool.num_replicas)
            and not pools[tier.name][f"num_{role}"]
        ]
        if not lacking:
            self._is_starting = False
        if not self._is_starting:
            lacking = [
                name
                for name, pool in pools.items()
                if not pool["num_prefill"] + pool["num_decode"] and name not in self._may_be_empty
            ]
        reason = f"no worker accepts requests for {', '.join(lacking)}" if lacking else ""
        return Readiness(not lacking, reason, pools, self._ingress_id)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the workers of a start, up to `timeout_s`. Returns whether it is ready."""
        deadline = time.monotonic() + timeout_s
        while not self.readiness().ready:
            if time.monotonic() >= deadline:
                self._is_starting = False  # a pool without workers must not block the others
                return self.readiness().ready
            await asyncio.sleep(READY_POLL_S)
        return True

    def load(self) -> dict[str, float]:
        """The load report for the autoscaler."""
        waiting = {
            tier.name: self.admission_queue.num_uncomputed_tokens(tier.name)
            for tier in self._config.tiers
        }
        return report(self.dispatcher.demand, waiting, sum_pools(self.fleet.reports()))

    def _share_limits(self) -> asyncio.Task[None] | None:
        """Share tenants' limits with other ingresses in a task; None if there is nothing to do."""
        config = self._config
        is_limited = any(tenant.is_limited for tenant in config.tenants.values())
        if config.redis_url is None or not is_limited:
            return None
        board = RedisBoard(config.redis_url, secret=config.cluster_key.encode())
        return asyncio.create_task(keep_in_step(self._limits, board, self._ingress_id))

    def _num_batch_requests(self) -> int:
        """Requests of a batch at a time: as many as the workers have places, and at most an eighth
        of all that this ingress serves."""
        workers = self.fleet.view().workers.values()
        places = sum(worker.record.max_num_seqs for worker in workers)
        return max(1, min(places, self._config.http.max_num_requests // 8))

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        tasks = [task for task in (self._sharing, self._sampling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()

    def _observe_wait(self, tenant: str, seconds: float) -> None:
        self._metrics.of("queue_wait_seconds", self._config.tenant_class(tenant)).observe(seconds)

    def _refresh_queue(self) -> None:
        lengths = dict.fromkeys([DEFAULT_TENANT, *self._config.tenants], 0)
        for tenant, number in self.admission_queue.num_by_tenant().items():
            lengths[self._config.tenant_class(tenant)] += number
        for name, number in lengths.items():
            self._metrics.of("queue_num_requests", name).set(number)
        self._metrics.of("queue_bytes").set(self.admission_queue.nbytes)

    def _generate(self, request: GenerateRequest, put: PutDelta) -> Awaitable[None]:
        if self._escalation is not None and request.model == AUTO:
            return self._escalation.generate(request, put)
        return self._dispatch(request, put)

    def _dispatch(self, request: GenerateRequest, put: PutDelta) -> Awaitable[None]:
        """Run a request on the workers of its model, with its own SLOs or the model's."""
        ttft_slo_s, tpot_slo_s = self._slo_s[request.model]
        priority = request.priority
        if request.ttft_slo_s == math.inf:  # requests with a TTFT SLO go first
            priority = max(priority, PRIORITY_WITHOUT_SLO)
        with_slo = msgspec.structs.replace(
            request,
            ttft_slo_s=request.ttft_slo_s or ttft_slo_s,
            tpot_slo_s=request.tpot_slo_s or tpot_slo_s,
            priority=priority,
        )
        return self.dispatcher.generate(with_slo, put)

    def _cascade_decision(self, request_id: str) -> CascadeDecision | None:
        return None if self._escalation is None else self._escalation.decision(request_id)

    def _explanation(self, request_id: str, tenant: str) -> bytes | None:
        routes, cascade = self.dispatcher.decision(request_id), self._cascade_decision(request_id)
        if not routes or any(each.tenant != tenant for each in routes):  # clients may reuse ids
            return None
        return msgspec.json.encode(Explanation(routes, cascade))


def served_models(config: ServeConfig) -> dict[str, ServedModel]:
    """All models that clients may use, by name.

    Raises:
        ModelError: a file that the API needs is missing from a model's directory, or the tiers
            cannot form a cascade.
    """
    domains = config.http.allowed_media_domains
    models = {tier.name: _served_model(tier, domains) for tier in config.tiers}
    if config.cascade is not None:
        check_one_language(list(models.values()))
    return models | _auto(config, models)


def _auto(config: ServeConfig, models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
    if config.cascade is None:
        return {}
    return {AUTO: auto_model([models[tier.name] for tier in config.tiers])}


def _served_model(tier: TierConfig, media_domains: tuple[str, ...]) -> ServedModel:
    foreign = None
    if tier.engine.backend == "vllm":
        foreign = describe_foreign(tier.directory, tier.engine.engine_args)
    model = ServedModel.from_description(
        foreign or describe_model(tier.directory),
        name=tier.name,
        block_size=tier.engine.block_size or PROVISIONAL_BLOCK_SIZE,
        max_model_len=tier.engine.max_model_len,
        chat_template=tier.chat_template,
        tool_call_parser=tier.tool_call_parser,
        reasoning_parser=tier.reasoning_parser,
        created_unix_s=int(time.time()),
    )
    if foreign is not None:
        model = model.with_images(media_domains, foreign.image_token_id)
    slo_s, deferral = (tier.ttft_goal_s, tier.tpot_goal_s), ""
    drafts = tier.engine.speculative_config
    if drafts is not None and drafts.model is not None and drafts.deferral:
        deferral = f"tokens of {Path(drafts.model).name} stand within {drafts.deferral:g}"
    return dataclasses.replace(model, slo_s=slo_s, full_name=tier.full_name, deferral=deferral)


def _differs(model: ServedModel, record: WorkerRecord) -> bool:
    return (model.block_size, model.max_model_len) != (record.block_size, record.max_model_len)
