"""Several simulated ingresses in front of the same workers: each knows what workers report to it.

Reports are bounded in rate as on a link (`links.reports`), so what an ingress knows of a large
fleet is as old as in production.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Sequence

from disagg.blocks import BlockHash
from disagg.links.reports import LinkReports
from disagg.messages import KVEvent, WorkerRecord, WorkerStatus
from disagg.router.fleet import Fleet


class SimulatedReports:
    """What workers report to one ingress: to `fleet`, when a link would.

    Args:
        interval_s: between two reports of a worker, at least.
    """

    def __init__(self, loop: AbstractEventLoop, fleet: Fleet, interval_s: float) -> None:
        self._loop = loop
        self._fleet = fleet
        self._interval_s = interval_s
        self._links: dict[str, LinkReports] = {}
        self._latest: dict[str, WorkerStatus] = {}
        self._timers: dict[str, TimerHandle] = {}

    def request_arrived(self, worker_id: str) -> None:
        """A request of this ingress was sent to the worker."""
        if worker_id in self._links:
            self._links[worker_id].request_arrived()

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        reports = self._links[record.worker_id] = LinkReports()
        reports.interval_s = self._interval_s
        reports.restart(status, self._loop.time())
        self._fleet.worker_synced(record, block_hashes, status)

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus
    ) -> None:
        if not self._interval_s:
            self._fleet.worker_stepped(worker_id, kv_events, status)
            return
        reports, now = self._links[worker_id], self._loop.time()
        reports.hold(kv_events)
        self._latest[worker_id] = status
        wait_s = reports.wait_s(status, now)
        if wait_s == 0.0:
            report = reports.take(status, now)
            self._fleet.worker_stepped(worker_id, report.kv_events, status)
        elif wait_s is not None and worker_id not in self._timers:
            self._timers[worker_id] = self._loop.call_later(wait_s, self._report, worker_id)

    def worker_lost(self, worker_id: str) -> None:
        timer = self._timers.pop(worker_id, None)
        if timer is not None:
            timer.cancel()
        self._links.pop(worker_id, None)
        self._latest.pop(worker_id, None)
        self._fleet.worker_lost(worker_id)

    def _report(self, worker_id: str) -> None:
        """What has waited."""
        del self._timers[worker_id]
        self.worker_stepped(worker_id, (), self._latest[worker_id])


class EveryIngress:
    """Passes what a worker reports to all ingresses."""

    def __init__(self, each: Sequence[SimulatedReports]) -> None:
        self._each = each

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        for reports in self._each:
            reports.worker_synced(record, block_hashes, status)

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus
    ) -> None:
        for reports in self._each:
            reports.worker_stepped(worker_id, kv_events, status)

    def worker_lost(self, worker_id: str) -> None:
        for reports in self._each:
            reports.worker_lost(worker_id)
