"""Prometheus metrics about workers. Metrics about requests are in `api/http/metrics.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from disagg.messages import HostCounts, WorkerRecord, WorkerStatus

# Of each worker, by the metric's name: what its HELP says, and what its value is. One line each.
WORKER_GAUGES: Mapping[str, tuple[str, Callable[[WorkerRecord, WorkerStatus], float]]] = {
    "worker_num_requests_running": (
        "Sequences in the batch of a worker",
        lambda _, status: status.num_running,
    ),
    "worker_num_requests_waiting": (
        "Sequences that wait in the queue of a worker",
        lambda _, status: status.num_waiting,
    ),
    "worker_kv_cache_usage_perc": (
        "Share of a worker's KV blocks that sequences use, from 0 to 1",
        lambda record, status: 1.0 - status.num_free_blocks / record.num_blocks,
    ),
    "worker_kv_holds": (
        "Tickets of a worker whose KV blocks wait to be pulled",
        lambda _, status: status.num_holds,
    ),
    "worker_requests_bytes": (
        "Bytes of the requests on a worker, its queue included",
        lambda _, status: status.requests_nbytes,
    ),
    "worker_step_time_error": (
        "Median error of a worker's recent predictions of step times, as a fraction",
        lambda _, status: status.step_costs.median_error if status.step_costs else 0.0,
    ),
    "worker_draft_tokens": (
        "Tokens of drafts that a worker has verified since it started",
        lambda _, status: status.num_drafted,
    ),
    "worker_accepted_draft_tokens": (
        "Tokens of drafts that a worker has verified and found right since it started",
        lambda _, status: status.num_accepted,
    ),
    "worker_preemptions": (
        "Sequences that a worker took off its batch for want of KV blocks, since it started",
        lambda _, status: status.num_preempted,
    ),
}


class FleetMetrics:
    """An ingress's view of its workers, as Prometheus metrics.

    Labels are bounded by the configuration and the membership: `keep_only` drops the series of
    workers that have left.

    Args:
        registry: what `GET /metrics` renders; None makes one.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._workers: set[tuple[str, str, str]] = set()
        self._pairs: dict[tuple[str, str], str] = {}  # the lane of each
        self._stores: set[tuple[str, str, str, str]] = set()
        self._hosts: set[tuple[str, str, str]] = set()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"disagg_{name}", text, labels, registry=self.registry)

        worker, pair = ("model_name", "role", "worker_id"), ("source_id", "worker_id")
        self._of_workers = {
            name: gauge(name, text, *worker) for name, (text, _) in WORKER_GAUGES.items()
        }
        self._store = gauge(
            "worker_store_blocks",
            "KV blocks on their way from a worker to the store or back, since the worker started",
            *worker,
            "outcome",
        )
        self._host_nbytes = gauge(
            "worker_host_tier_bytes",
            "Bytes of evicted KV blocks that a worker keeps in host memory",
            *worker,
        )
        self._host_blocks = gauge(
            "worker_host_tier_blocks",
            "KV blocks moved between a worker's cache and its host memory since it started",
            *worker,
            "outcome",
        )
        self._host_load_s = gauge(
            "worker_host_tier_load_seconds",
            "Seconds a worker has spent on loading KV from its host memory",
            *worker,
        )
        self._link = gauge(
            "worker_link_buffer_bytes",
            "Bytes that wait in this ingress to be sent to a worker",
            *worker,
        )
        self._index_nbytes = gauge(
            "prefix_index_bytes", "Bytes of this ingress that hold the names of cached KV blocks"
        )
        self._index_blocks = gauge(
            "prefix_index_blocks", "KV blocks that this ingress knows to be cached on some worker"
        )
        self._limits_shared = gauge(
            "tenant_limits_shared",
            "1: tenants' limits hold over all ingresses together; 0: the store that they share is"
            " away, and this ingress grants them in full by itself",
        )
        self._rate = gauge(
            "kv_transfer_bytes_per_second", "Rate of pulling KV from source_id, as fitted", *pair
        )
        self._latency = gauge(
            "kv_transfer_latency_seconds", "Time before the first byte of a pull, as fitted", *pair
        )
        self._lane = gauge(
            "kv_transfer_lane",
            "1: this lane carried the last pull of KV from source_id",
            *pair,
            "lane",
        )
        self._moves = Counter(
            "disagg_request_moves",
            "Requests that went on elsewhere after a worker or a transfer failed",
            ("model_name",),
            registry=self.registry,
        )
        self._loans = Counter(
            "disagg_prefix_loans",
            "Prefixes that a worker was to pull from another one's cache",
            ("model_name", "result"),
            registry=self.registry,
        )

    def request_moved(self, model: str) -> None:
        self._moves.labels(model).inc()

    def prefix_asked(self, model: str, is_lent: bool) -> None:
        self._loans.labels(model, "lent" if is_lent else "refused").inc()

    def worker(self, record: WorkerRecord, status: WorkerStatus, link_nbytes: int) -> None:
        """What a worker said after its last step.

        Args:
            link_nbytes: that wait here to be sent to it.
        """
        series = (record.model, record.role, record.worker_id)
        self._workers.add(series)
        for name, (_, value) in WORKER_GAUGES.items():
            self._of_workers[name].labels(*series).set(value(record, status))
        self._link.labels(*series).set(link_nbytes)

    def prefix_index(self, nbytes: int, num_blocks: int) -> None:
        """The router's knowledge of caches."""
        self._index_nbytes.set(nbytes)
        self._index_blocks.set(num_blocks)

    def limits_shared(self, is_shared: bool) -> None:
        self._limits_shared.set(is_shared)

    def store(self, model: str, role: str, worker_id: str, num_blocks: Mapping[str, int]) -> None:
        """What became of blocks on their way to and from the store, by outcome."""
        for outcome, count in num_blocks.items():
            series = (model, role, worker_id, outcome)
            self._stores.add(series)
            self._store.labels(*series).set(count)

    def host_tier(self, model: str, role: str, worker_id: str, host: HostCounts) -> None:
        """What is in the host memory behind a worker's cache, and what was copied to and fro."""
        series = (model, role, worker_id)
        self._hosts.add(series)
        self._host_nbytes.labels(*series).set(host.nbytes)
        self._host_load_s.labels(*series).set(host.load_s)
        for outcome, count in _by_outcome(host).items():
            self._host_blocks.labels(*series, outcome).set(count)

    def transfer(
        self, source_id: str, worker_id: str, *, latency_s: float, bytes_per_s: float, lane: str
    ) -> None:
        """What a worker measured when it pulled from a source."""
        pair = (source_id, worker_id)
        before = self._pairs.get(pair)
        if before and before != lane:
            self._lane.remove(*pair, before)
        if lane:
            self._lane.labels(*pair, lane).set(1)
        self._pairs[pair] = lane
        self._rate.labels(source_id, worker_id).set(bytes_per_s)
        self._latency.labels(source_id, worker_id).set(latency_s)

    def keep_only(self, worker_ids: Collection[str]) -> None:
        """Drop the series of workers that have left."""
        gauges = (*self._of_workers.values(), self._link)
        for worker in [each for each in self._workers if each[-1] not in worker_ids]:
            self._workers.remove(worker)
            for gauge in gauges:
                gauge.remove(*worker)
        for store in [each for each in self._stores if each[2] not in worker_ids]:
            self._stores.remove(store)
            self._store.remove(*store)
        for host in [each for each in self._hosts if each[2] not in worker_ids]:
            self._hosts.remove(host)
            self._host_nbytes.remove(*host)
            self._host_load_s.remove(*host)
            for outcome in _by_outcome(HostCounts()):
                self._host_blocks.remove(*host, outcome)
        for pair in [each for each in self._pairs if not set(each) <= set(worker_ids)]:
            lane = self._pairs.pop(pair)
            if lane:
                self._lane.remove(*pair, lane)
            self._rate.remove(*pair)
            self._latency.remove(*pair)


def _by_outcome(host: HostCounts) -> dict[str, int]:
    return {
        "saved": host.num_saved,
        "torn": host.num_torn,
        "dropped": host.num_dropped,
        "loaded": host.num_loaded,
    }
