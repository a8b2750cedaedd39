"""What an ingress counts about its workers, beside what `metrics` counts about requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from disagg.messages import HostCounts


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
        self._running = gauge("worker_num_requests_running", "Sequences in the batch", *worker)
        self._waiting = gauge("worker_num_requests_waiting", "Sequences in the queue", *worker)
        self._kv_usage = gauge("worker_kv_cache_usage_perc", "KV in use, 0 to 1", *worker)
        self._holds = gauge("worker_kv_holds", "Tickets whose blocks wait to be pulled", *worker)
        self._store = gauge(
            "worker_store_blocks", "Between a worker and the store, so far", *worker, "outcome"
        )
        self._host_nbytes = gauge("worker_host_tier_bytes", "Of KV blocks in host memory", *worker)
        self._host_blocks = gauge(
            "worker_host_tier_blocks",
            "Between a worker's cache and host memory, so far",
            *worker,
            "outcome",
        )
        self._host_load_s = gauge(
            "worker_host_tier_load_seconds", "Spent on loading from host memory, so far", *worker
        )
        self._requests = gauge("worker_requests_bytes", "Prompts on it", *worker)
        self._link = gauge("worker_link_buffer_bytes", "Waiting to be sent to it", *worker)
        self._step_error = gauge(
            "worker_step_time_error", "Median of recent predictions, a fraction", *worker
        )
        self._drafted = gauge("worker_draft_tokens", "Verified in drafts, so far", *worker)
        self._accepted = gauge("worker_accepted_draft_tokens", "Of these, right", *worker)
        self._index_nbytes = gauge("prefix_index_bytes", "Memory of what workers are known to have")
        self._index_blocks = gauge("prefix_index_blocks", "Blocks that workers are known to have")
        self._limits_shared = gauge(
            "tenant_limits_shared",
            "1: tenants' limits hold over all ingresses together; 0: the store that they share is"
            " away, and this ingress grants them in full by itself",
        )
        self._rate = gauge("kv_transfer_bytes_per_second", "Fitted", *pair)
        self._latency = gauge("kv_transfer_latency_seconds", "Fitted", *pair)
        self._lane = gauge("kv_transfer_lane", "1: carried the last of them", *pair, "lane")
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

    def worker(
        self,
        model: str,
        role: str,
        worker_id: str,
        *,
        num_running: int,
        num_waiting: int,
        kv_usage: float,
        num_holds: int,
        requests_nbytes: int,
        link_nbytes: int,
        step_error: float,
        num_drafted: int,
        num_accepted: int,
    ) -> None:
        """A worker's load as of its last step.

        Args:
            kv_usage: a fraction.
            requests_nbytes: of the prompts on it.
            link_nbytes: that wait here to be sent to it.
            step_error: of its time model, a fraction.
            num_drafted, num_accepted: tokens of drafts that it verified, and found right.
        """
        series = (model, role, worker_id)
        self._workers.add(series)
        self._running.labels(*series).set(num_running)
        self._waiting.labels(*series).set(num_waiting)
        self._kv_usage.labels(*series).set(kv_usage)
        self._holds.labels(*series).set(num_holds)
        self._requests.labels(*series).set(requests_nbytes)
        self._link.labels(*series).set(link_nbytes)
        self._step_error.labels(*series).set(step_error)
        self._drafted.labels(*series).set(num_drafted)
        self._accepted.labels(*series).set(num_accepted)

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
        gauges = (
            self._running,
            self._waiting,
            self._kv_usage,
            self._holds,
            self._requests,
            self._link,
            self._step_error,
            self._drafted,
            self._accepted,
        )
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
