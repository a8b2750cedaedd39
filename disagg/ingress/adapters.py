"""The LoRA adapters that an ingress serves, which all ingresses and workers agree on.

An ingress that loads or unloads one tells the workers, and they tell the other ingresses with their
status. Whoever is new, worker or ingress, learns from the first exchange. See `disagg.adapters`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from disagg.adapters import Adapter, AdapterBoard, AdapterEntry, AdapterReport
from disagg.api.served_model import ServedModel
from disagg.blocks import BlockHash
from disagg.config import ServeConfig, TierConfig
from disagg.errors import ModelError, RequestError, Unavailable
from disagg.messages import AdapterNews, KVEvent, WorkerRecord, WorkerStatus
from disagg.models.adapter import configured_adapters, find_adapter
from disagg.models.description import describe_model
from disagg.router.fleet import Fleet

log = logging.getLogger(__name__)

TELL_TIMEOUT_S = 10.0
POLL_S = 0.005


class ServedAdapters:
    """Implements `api.service.AdapterTable` for one ingress.

    Args:
        models: the served models by name; they may be replaced.
        send: sends a message to a worker.
        now: returns Unix time in seconds.

    Raises:
        ModelError: an adapter of the configuration cannot be served.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: Mapping[str, ServedModel],
        send: Callable[[str, AdapterNews], None],
        now: Callable[[], float],
    ) -> None:
        self._tiers = {tier.name: tier for tier in config.tiers if tier.engine.enable_lora}
        self._models, self._send, self._now = models, send, now
        self._board = AdapterBoard()
        for name, tier in self._tiers.items():
            model, rank = describe_model(tier.directory), tier.engine.max_lora_rank
            self._board.merge(configured_adapters(tier.lora_modules, name, model, rank))
        self._reports: dict[str, tuple[str, AdapterReport]] = {}  # model and report of a worker
        self._served: dict[str, ServedModel] = {}

    def all(self) -> list[ServedModel]:
        return [self._model(adapter) for adapter in self._board.served()]

    def find(self, name: str) -> ServedModel | None:
        """The adapter of that name as a model that clients can use."""
        named = (each for each in self._board.served() if each.name == name)
        adapter = next(named, None)
        return None if adapter is None else self._model(adapter)

    async def load(self, name: str, path: str, model: str | None, *, in_place: bool) -> None:
        """Serve an adapter under a name, and return when all workers know it.

        Args:
            model: the served name of its base; None: there is only one with adapters.
            in_place: whether it may replace another adapter of this name.

        Raises:
            RequestError: it cannot be served, or the name is taken.
        """
        tier = self._tier(model)
        if name in self._models:
            raise RequestError(
                f"{name!r} is a served model; choose another name.", param="lora_name"
            )
        directory, rank = tier.directory, tier.engine.max_lora_rank
        try:
            described = await asyncio.to_thread(describe_model, directory)
            adapter = await asyncio.to_thread(find_adapter, name, path, tier.name, described, rank)
        except ModelError as error:
            raise RequestError(
                f"The LoRA adapter {name!r} cannot be served: {error.message}.", param="lora_path"
            ) from error
        before = self.find(name)
        if before is not None and before.adapter != adapter and not in_place:
            raise RequestError(
                f"The name {name!r} has another LoRA adapter; set load_inplace to replace it, or"
                " unload it first.",
                param="lora_name",
            )
        await self._change(AdapterEntry(adapter, self._now()))

    async def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that run with it go on.

        Raises:
            RequestError: there is none of this name.
        """
        found = self.find(name)
        if found is None or found.adapter is None:
            raise RequestError(
                f"There is no LoRA adapter {name!r}; GET /v1/models lists those that are served.",
                param="lora_name",
            )
        await self._change(AdapterEntry(found.adapter, self._now(), is_served=False))

    def heard(self, record: WorkerRecord, status: WorkerStatus) -> None:
        """Take over what a worker knows, and tell it what it does not."""
        report, worker_id = status.adapters, record.worker_id
        if report is None:
            return
        _, before = self._reports.get(worker_id, ("", None))
        if report is before:
            return
        self._reports[worker_id] = record.model, report
        if before is not None and report.entries == before.entries:
            return
        if self._board.merge(report.entries):
            self._tell()
        else:
            self._tell_one(worker_id)

    def lost(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)

    async def _change(self, entry: AdapterEntry) -> None:
        self._board.merge([entry])
        self._tell()
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                while any(map(self._lacks, self._reports)):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(
                "Not all workers have answered. The change is kept, and they are told of it when"
                " they answer."
            ) from None

    def _lacks(self, worker_id: str) -> bool:
        model, report = self._reports[worker_id]
        return AdapterBoard(report.entries).lacks(self._board.of_model(model))

    def _tell(self) -> None:
        for worker_id in self._reports:
            self._tell_one(worker_id)

    def _tell_one(self, worker_id: str) -> None:
        if self._lacks(worker_id):
            model, _ = self._reports[worker_id]
            self._send(worker_id, AdapterNews(self._board.of_model(model)))

    def _tier(self, model: str | None) -> TierConfig:
        names = ", ".join(self._tiers)
        if not self._tiers:
            raise RequestError("LoRA is not enabled; start the server with --enable-lora.")
        if model is None and len(self._tiers) == 1:
            return next(iter(self._tiers.values()))
        if model is None:
            raise RequestError(
                f"Say in base_model whose adapter it is: {names}.", param="base_model"
            )
        if model not in self._tiers:
            raise RequestError(
                f"No model {model!r:.128} takes LoRA adapters; these do: {names}.",
                param="base_model",
            )
        return self._tiers[model]

    def _model(self, adapter: Adapter) -> ServedModel:
        base, known = self._models[adapter.model], self._served.get(adapter.name)
        if known is None or known.adapter != adapter or known.base is not base:
            known = dataclasses.replace(
                base, name=adapter.name, full_name="", adapter=adapter, base=base
            )
            self._served[adapter.name] = known
        return known


class FleetAndAdapters:
    """A `links.client.LinkObserver` that tells the fleet, and of LoRA adapters their table."""

    def __init__(self, fleet: Fleet, adapters: ServedAdapters) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._records: dict[str, WorkerRecord] = {}

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        self._records[record.worker_id] = record
        self._adapters.heard(record, status)
        self._fleet.worker_synced(record, block_hashes, status)

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus | None
    ) -> None:
        if status is not None and status.adapters is not None and worker_id in self._records:
            self._adapters.heard(self._records[worker_id], status)
        self._fleet.worker_stepped(worker_id, kv_events, status)

    def worker_lost(self, worker_id: str) -> None:
        self._records.pop(worker_id, None)
        self._adapters.lost(worker_id)
        self._fleet.worker_lost(worker_id)
