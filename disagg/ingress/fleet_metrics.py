"""Prometheus metrics from the last reports of an ingress's workers.

Most of them are the fields of `WorkerStatus` that are annotated with a `Metric`. Reports are read
when Prometheus scrapes, so the series of workers that have left disappear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from disagg.messages import PullCounts, Role, WorkerRecord, WorkerStatus
from disagg.metric import Metric

WorkerReports: TypeAlias = list[tuple[WorkerRecord, WorkerStatus]]
Reports: TypeAlias = Callable[[], WorkerReports]

WORKER = ("model_name", "role", "worker_id")
MAX_PAIRS = 1024  # largest number of pairs of workers, which grows with the square of workers


class Field(NamedTuple):
    """A figure in a worker's report."""

    path: tuple[str, ...]  # names of the fields that lead to it from a `WorkerStatus`
    metric: Metric


def fields_of(kind: type[msgspec.Struct], path: tuple[str, ...] = ()) -> Iterator[Field]:
    """The fields with a `Metric` of a struct and of the structs in it."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        place = (*path, name)
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, Metric):
                yield Field(place, each)
        for part in get_args(hint):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from fields_of(part, place)


FIELDS = tuple(fields_of(WorkerStatus))

_STATES = ("serving", "draining")
_OUTCOMES: dict[str, Callable[[PullCounts], int]] = {
    "ok": lambda counts: counts.num_ok,
    "torn": lambda counts: counts.num_torn,
    "failed": lambda counts: counts.num_failed,
    "given_up": lambda counts: counts.num_given_up,
}
_PAIR = ("source_id", "worker_id")
_BETWEEN = f"worker_id from source_id, fitted to recent pulls; for at most {MAX_PAIRS} pairs"


class WorkerMetric(NamedTuple):
    """A metric: its kind, its labels and its HELP."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    labels: tuple[str, ...]
    text: str


Sample: TypeAlias = tuple[str, tuple[str, ...], float]  # a metric's name, labels, the figure

# What is computed from reports. Fields of reports declare others.
TABLE = {
    "worker_kv_cache_usage_perc": WorkerMetric(GaugeMetricFamily, WORKER,
        "Share of a worker's KV blocks that requests or tickets use, from 0 to 1. Blocks that only"
        " cache prefixes count as free, because they can be evicted"),
    "worker_kv_blocks": WorkerMetric(GaugeMetricFamily, WORKER,
        "Number of KV blocks of a worker, used or not"),
    "workers": WorkerMetric(GaugeMetricFamily, ("model_name", "role", "state"),
        "Number of workers with a link to this ingress. state: serving (accepts requests) or"
        " draining (finishes its requests)"),
    "worker_spec_decode_num_accepted_tokens_per_pos": WorkerMetric(
        CounterMetricFamily, (*WORKER, "position"),
        "Drafts (speculative decoding) of a worker that were right up to a position, from 0 on"),
    "worker_kv_pulls": WorkerMetric(CounterMetricFamily, (*WORKER, "lane", "outcome"),
        "Number of KV transfers that a worker pulled from another one. lane: the UCX transport"
        " (cma, cuda_ipc, rc_mlx5, tcp, ...; empty if unknown). outcome: ok, torn (the source had"
        " reused the blocks, so the copy was discarded), failed, or given_up (no request needed it"
        " any more). After every outcome except ok, the worker that pulled computes the prompt"),
    "worker_kv_pull_bytes": WorkerMetric(CounterMetricFamily, (*WORKER, "lane"),
        "Bytes of KV of pulls with outcome ok"),
    "worker_kv_pull_seconds": WorkerMetric(CounterMetricFamily, (*WORKER, "lane"),
        "Time of pulls with outcome ok, from their start until their stamps were compared. Bytes"
        " divided by seconds is the rate of a pull"),
    "kv_transfer_bytes_per_second": WorkerMetric(GaugeMetricFamily, _PAIR,
        f"Rate of KV pulls by {_BETWEEN}"),
    "kv_transfer_latency_seconds": WorkerMetric(GaugeMetricFamily, _PAIR,
        f"Time before the first byte of KV pulls by {_BETWEEN}"),
    "kv_transfer_lane": WorkerMetric(GaugeMetricFamily, (*_PAIR, "lane"),
        "1 for the lane (UCX transport) of the last KV pull by worker_id from source_id"),
}  # fmt: skip


class FleetMetrics(Collector):
    """A collector of an ingress's view of its workers.

    The configuration and the membership limit the number of label values.

    Args:
        reports: returns the last report of each worker.
        pools: the configured pools; a pool without workers is shown with 0 workers.
    """

    def __init__(self, reports: Reports, pools: Collection[tuple[str, Role]] = ()) -> None:
        self._reports = reports
        self._pools = pools

    def describe(self) -> Iterable[Family]:
        """No metrics, so that names are not compared with other collectors before a scrape."""
        return ()

    def collect(self) -> Iterable[Family]:
        families = {
            name: row.kind(f"disagg_{name}", row.text, labels=row.labels)
            for name, row in (*TABLE.items(), *map(_declared_metric, FIELDS))
        }
        reports = self._reports()
        of_workers = self._of_workers, _sample_fields, _of_drafts, _of_pulls, _of_pairs
        for samples in (self._of_pools, *of_workers):
            for name, labels, figure in samples(reports):
                families[name].add_metric(labels, figure)
        return families.values()

    def _of_pools(self, reports: WorkerReports) -> Iterator[Sample]:
        numbers = {(*pool, state): 0 for pool in self._pools for state in _STATES}
        for record, status in reports:
            for state in _STATES:
                numbers.setdefault((record.model, record.role, state), 0)
            numbers[record.model, record.role, state_of(status)] += 1
        for labels, number in numbers.items():
            yield "workers", labels, number

    def _of_workers(self, reports: WorkerReports) -> Iterator[Sample]:
        for record, status in reports:
            series = _series(record)
            usage = 1.0 - status.num_free_blocks / record.num_blocks
            yield "worker_kv_cache_usage_perc", series, usage
            yield "worker_kv_blocks", series, record.num_blocks


class LinkBuffers(Collector):
    """A collector of what an ingress has not yet sent to its workers.

    Args:
        reports: returns the last report of each worker.
        link_nbytes: returns the bytes that wait to be sent to a worker, by id.
    """

    def __init__(self, reports: Reports, link_nbytes: Callable[[str], int]) -> None:
        self._reports = reports
        self._link_nbytes = link_nbytes

    def collect(self) -> Iterable[Family]:
        family = GaugeMetricFamily(
            "disagg_worker_link_buffer_bytes",
            "Number of bytes that wait in this ingress to be sent to a worker. It is near 0 unless"
            " the worker or the network to it is stuck",
            labels=WORKER,
        )
        for record, _ in self._reports():
            family.add_metric(_series(record), self._link_nbytes(record.worker_id))
        return [family]


def _declared_metric(field: Field) -> tuple[str, WorkerMetric]:
    metric = field.metric
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return f"worker_{metric.name}", WorkerMetric(
        kind, (*WORKER, *(metric.label or ())[:1]), metric.text
    )


def _sample_fields(reports: WorkerReports) -> Iterator[Sample]:
    """The metrics that `WorkerStatus` declares."""
    for path, metric in FIELDS:
        value = (metric.label or ())[1:]
        for record, status in reports:
            owner: Any = attrgetter(path[0])(status) if len(path) > 1 else status
            if owner is not None:  # None if the worker does not have this feature
                figure = attrgetter(".".join(path))(status)
                yield f"worker_{metric.name}", (*_series(record), *value), figure


def _of_drafts(reports: WorkerReports) -> Iterator[Sample]:
    for record, status in reports:
        for position, number in enumerate(status.num_accepted_at):
            labels = (*_series(record), str(position))
            yield "worker_spec_decode_num_accepted_tokens_per_pos", labels, number


def _of_pulls(reports: WorkerReports) -> Iterator[Sample]:
    for record, status in reports:
        for counts in status.pulls:
            labels = (*_series(record), counts.lane)
            for outcome, number in _OUTCOMES.items():
                yield "worker_kv_pulls", (*labels, outcome), number(counts)
            yield "worker_kv_pull_bytes", labels, counts.nbytes
            yield "worker_kv_pull_seconds", labels, counts.seconds


def _of_pairs(reports: WorkerReports) -> Iterator[Sample]:
    present = {record.worker_id for record, _ in reports}
    num_left = MAX_PAIRS
    for record, status in reports:
        figures = [each for each in status.transfers if each.source_id in present][:num_left]
        num_left -= len(figures)
        for figure in figures:
            ids = (figure.source_id, record.worker_id)
            yield "kv_transfer_bytes_per_second", ids, figure.bytes_per_s
            yield "kv_transfer_latency_seconds", ids, figure.latency_s
            if figure.lane:
                yield "kv_transfer_lane", (*ids, figure.lane), 1


def state_of(status: WorkerStatus) -> Literal["serving", "draining"]:
    return "serving" if status.accepting else "draining"


def _series(record: WorkerRecord) -> tuple[str, str, str]:
    return record.model, record.role, record.worker_id
