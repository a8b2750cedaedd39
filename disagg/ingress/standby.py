"""Standby workers: they are loaded, but get no requests until a worker of their pool is gone.

This module sits between the links and the fleet, and shows standby workers to the fleet as not
accepting. The oldest workers serve, so that all ingresses decide alike; a draining worker does not
serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from disagg.blocks import BlockHash
from disagg.ingress.adapters import ServedAdapters
from disagg.messages import KVEvent, WorkerRecord, WorkerStatus
from disagg.router.fleet import Fleet
from disagg.router.worker_view import Pool


class Standby:
    """A `LinkObserver` between the links and the fleet that hides standby workers.

    Args:
        adapters: hears what workers say of LoRA adapters.
        num_serving: number of serving workers in each pool with standby workers; in other pools
            all workers serve.
    """

    def __init__(
        self,
        fleet: Fleet,
        num_serving: Mapping[Pool, int],
        adapters: ServedAdapters | None = None,
    ) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._num_serving = num_serving
        self._known: dict[str, tuple[WorkerRecord, WorkerStatus]] = {}
        self._standing_by: set[str] = set()

    def stands_by(self, worker_id: str) -> bool:
        """Whether a worker accepts requests but is shown to the fleet as not accepting."""
        return worker_id in self._standing_by and self._known[worker_id][1].accepting

    # links.client.LinkObserver

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        self._known[record.worker_id] = record, status
        if self._adapters is not None:
            self._adapters.heard(record, status)
        self._standing_by.add(record.worker_id)  # until the next line decides
        self._fleet.worker_synced(record, block_hashes, self._show(record.worker_id))
        self._update_pool((record.model, record.role))

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus | None
    ) -> None:
        if worker_id not in self._known:
            return
        if status is None:
            self._fleet.worker_stepped(worker_id, kv_events, None)
            return
        record, before = self._known[worker_id]
        self._known[worker_id] = record, status
        if self._adapters is not None and status.adapters is not before.adapters:
            self._adapters.heard(record, status)
        self._fleet.worker_stepped(worker_id, kv_events, self._show(worker_id))
        if status.accepting != before.accepting:
            self._update_pool((record.model, record.role))

    def worker_lost(self, worker_id: str) -> None:
        self._fleet.worker_lost(worker_id)
        if self._adapters is not None:
            self._adapters.lost(worker_id)
        record, _ = self._known.pop(worker_id, (None, None))
        self._standing_by.discard(worker_id)
        if record is not None:
            self._update_pool((record.model, record.role))

    def _update_pool(self, pool: Pool) -> None:
        """Decide which workers of a pool serve, and report changes to the fleet."""
        accepting = [
            record
            for record, status in self._known.values()
            if (record.model, record.role) == pool and status.accepting
        ]
        accepting.sort(key=lambda record: (record.epoch, record.worker_id))
        num_serving = self._num_serving.get(pool, len(accepting))
        for i, record in enumerate(accepting):
            stands_by = i >= num_serving
            if stands_by == (record.worker_id in self._standing_by):
                continue
            if stands_by:
                self._standing_by.add(record.worker_id)
            else:
                self._standing_by.remove(record.worker_id)
            self._fleet.worker_stepped(record.worker_id, (), self._show(record.worker_id))

    def _show(self, worker_id: str) -> WorkerStatus:
        _, status = self._known[worker_id]
        if worker_id in self._standing_by:
            return msgspec.structs.replace(status, accepting=False)
        return status
