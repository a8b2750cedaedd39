"""Several simulated ingresses in front of the same workers. Each knows what workers report to it.

The rate of reports is bounded as on a real link (`links.reports`), so an ingress's view of a large
fleet is as old as in production.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence

from disagg.blocks import BlockHash
from disagg.links.reports import LinkReports, Report
from disagg.links.server import choose_home
from disagg.messages import KVEvent, WorkerRecord, WorkerStatus
from disagg.router.fleet import Fleet


def ingress_id_of(number: int) -> str:
    return f"ingress-{number}"


class SimulatedReports:
    """Passes the reports of workers to one ingress's `fleet`, at the times at which a link would.

    Args:
        interval_s: least time between two reports of a worker; None: there is one ingress, which
            gets a report of every step.
    """

    def __init__(self, loop: AbstractEventLoop, fleet: Fleet, interval_s: float | None) -> None:
        self._loop = loop
        self._fleet = fleet
        self._interval_s = interval_s
        self._links: dict[str, LinkReports] = {}

    def request_arrived(self, worker_id: str) -> None:
        """Record that this ingress sent a request to the worker."""
        if worker_id in self._links:
            self._links[worker_id].request_arrived()

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        worker_id = record.worker_id
        reports = LinkReports(self._loop, lambda report: self._send(worker_id, report))
        reports.interval_s = self._interval_s or 0.0
        reports.restart(status)
        self._links[worker_id] = reports
        self._fleet.worker_synced(record, block_hashes, status)

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus
    ) -> None:
        if self._interval_s is None:
            self._fleet.worker_stepped(worker_id, kv_events, status)
            return
        report = self._links[worker_id].after_step(kv_events, status)
        if report is not None:
            self._send(worker_id, report)

    def requests_arrived(self, worker_id: str, status: WorkerStatus) -> None:
        """Record that the worker's next step computes requests that have arrived there."""
        report = self._links[worker_id].others_arrived(status)
        if report is not None:
            self._send(worker_id, report)

    def worker_lost(self, worker_id: str) -> None:
        if worker_id in self._links:
            self._links.pop(worker_id).stop()
        self._fleet.worker_lost(worker_id)

    def _send(self, worker_id: str, report: Report) -> None:
        status = None if report.status is None else self._links[worker_id].status
        self._fleet.worker_stepped(worker_id, report.kv_events, status)


class EveryIngress:
    """Passes a worker's reports to all ingresses."""

    def __init__(self, each: Sequence[SimulatedReports]) -> None:
        self._each = each
        self._ingress_ids = [ingress_id_of(number) for number in range(len(each))]

    def home_of(self, worker_id: str) -> str:
        return choose_home(worker_id, self._ingress_ids)

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

    def requests_arrived(self, worker_id: str, status: Callable[[], WorkerStatus]) -> None:
        if len(self._each) > 1:  # a single ingress sends all requests itself
            now = status()
            for reports in self._each:
                reports.requests_arrived(worker_id, now)

    def worker_lost(self, worker_id: str) -> None:
        for reports in self._each:
            reports.worker_lost(worker_id)
