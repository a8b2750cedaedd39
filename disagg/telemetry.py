"""Traces (OpenTelemetry, which only this file imports) and the metrics of a fleet (Prometheus).

Tracing is off, and then nearly free, unless the standard variable OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set when `setup` runs; the SDK reads the other OTEL_*
variables itself. A span's parent is a W3C `traceparent` that travels in our messages: requests
cross threads and processes that share no context variable. Nothing here blocks a caller or ends a
request: a bad header starts a new trace, a collector that is away costs spans, never time.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, Tracer
    from prometheus_client import CollectorRegistry

Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes: TypeAlias = Mapping[str, Value]
Kind: TypeAlias = Literal["internal", "server", "client"]

_log = logging.getLogger(__name__)
_EXIT_TIMEOUT_S = 2.0
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACEPARENT_LEN = 55
_MAX_HEADER_LEN = 512
_SAMPLED = 0x01


class TraceParent(NamedTuple):
    """A valid `traceparent` header, W3C Trace Context level 1."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    sampled: bool


def parse_traceparent(header: str) -> TraceParent | None:
    """The header's parts, or None when it is not valid (https://www.w3.org/TR/trace-context/)."""
    if len(header) > _MAX_HEADER_LEN:
        return None
    match = _TRACEPARENT.fullmatch(header)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    parent = TraceParent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


class _Tracing:
    """What exists only while tracing is on."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context

        self.provider = provider
        self.tracer: Tracer = provider.get_tracer("disagg")
        self._trace = trace
        self._new_trace = Context()
        self._kinds = {
            "internal": trace.SpanKind.INTERNAL,
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
        }

    def start(
        self,
        name: str,
        parent: str,
        attributes: Attributes | None,
        kind: Kind,
        start_ns: int | None,
    ) -> OtelSpan:
        trace, under = self._trace, self._new_trace
        parsed = parse_traceparent(parent) if parent else None
        if parsed is not None:
            flags = trace.TraceFlags(_SAMPLED if parsed.sampled else 0)
            remote = trace.SpanContext(parsed.trace_id, parsed.span_id, True, flags)
            under = trace.set_span_in_context(trace.NonRecordingSpan(remote), under)
        return self.tracer.start_span(
            name, under, self._kinds[kind], attributes, start_time=start_ns
        )

    def fail(self, span: OtelSpan, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            span.record_exception(error)
            span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(self._trace.StatusCode.ERROR, str(error))


_tracing: _Tracing | None = None


class Span:
    """A piece of work under way; ends with its `with` block. `traceparent` is for its children."""

    __slots__ = ("_span", "_tracing", "traceparent")

    def __init__(self, tracing: _Tracing | None, span: OtelSpan | None, traceparent: str) -> None:
        self._tracing = tracing
        self._span = span
        self.traceparent = traceparent

    def set(self, key: str, value: Value) -> None:
        if self._span is not None:
            self._span.set_attribute(key, value)

    def fail(self, error: BaseException | str) -> None:
        """Mark the work as failed. An `Exception` that leaves the `with` block does it as well."""
        if self._tracing is not None and self._span is not None:
            self._tracing.fail(self._span, error)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        if isinstance(error, Exception):
            self.fail(error)
        elif error is not None:  # a cancelled task or a closed generator: the client went away
            self.set("cancelled", True)
        self._span.end()


def span(
    name: str, parent: str = "", attributes: Attributes | None = None, kind: Kind = "internal"
) -> Span:
    """Start a span; use it as `with span(...) as work:` in one function.

    Args:
        parent: a traceparent; "" or an invalid one starts a new trace. Whether the span is
            sampled follows the parent's flag (unless OTEL_TRACES_SAMPLER says otherwise).
    """
    tracing = _tracing
    if tracing is None:  # hand the caller's trace on, whoever else may record it
        return Span(None, None, parent if len(parent) == _TRACEPARENT_LEN else "")
    started = tracing.start(name, parent, attributes, kind, None)
    return Span(tracing, started, _format(started.get_span_context()))


def record_span(
    name: str,
    parent: str,
    start_unix_s: float,
    end_unix_s: float,
    attributes: Attributes | None = None,
    error: BaseException | str | None = None,
) -> str:
    """Record work that is over and was timed elsewhere; from any thread, without blocking.

    Returns the span's traceparent, for spans beneath it.
    """
    tracing = _tracing
    if tracing is None:
        return parent if len(parent) == _TRACEPARENT_LEN else ""
    done = tracing.start(name, parent, attributes, "internal", int(start_unix_s * 1e9))
    if error is not None:
        tracing.fail(done, error)
    done.end(int(max(start_unix_s, end_unix_s) * 1e9))
    return _format(done.get_span_context())


def setup(service_name: str, attributes: Attributes | None = None) -> bool:
    """Turn tracing on if the environment asks for it. Once per process; later calls do nothing.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over the arguments. Returns whether
    tracing is on.
    """
    global _tracing
    if _tracing is None and _wanted():
        _tracing = _Tracing(_provider({"service.name": service_name, **(attributes or {})}))
        atexit.register(shutdown)
    return _tracing is not None


def enabled() -> bool:
    """Whether spans go anywhere; for callers whose attributes are costly to compute."""
    return _tracing is not None


def flush(timeout_s: float = _EXIT_TIMEOUT_S) -> bool:
    """Send what is queued. False when that took longer than `timeout_s` (it goes on behind)."""
    tracing = _tracing
    return tracing is None or _bounded(tracing.provider.force_flush, timeout_s)


def shutdown(timeout_s: float = _EXIT_TIMEOUT_S) -> bool:
    """Send what is queued and turn tracing off, within `timeout_s`. `setup` may run again."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is None:
        return True
    atexit.unregister(shutdown)
    return _bounded(tracing.provider.shutdown, timeout_s)


def _wanted() -> bool:
    environment = os.environ
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if not any(environment.get(name, "").strip() for name in _ENDPOINT_VARIABLES):
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in exporters.split(","):
        if exporters != "none":
            _log.warning("OTEL_TRACES_EXPORTER=%s: only otlp and none are supported.", exporters)
        return False
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(name, "http/protobuf") != "http/protobuf":
            _log.warning(
                f"{name}={environment[name]} is not supported: spans go out as http/protobuf;"
                " point the endpoint at the collector's OTLP/HTTP port (usually 4318)."
            )
    return True


def _provider(attributes: Attributes) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(attributes).merge(OTELResourceDetector().detect())
    # The SDK's own exit hook may wait for half a minute; ours is bounded.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _format(of: SpanContext) -> str:
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-{int(of.trace_flags) & _SAMPLED:02x}"


def _bounded(call: Callable[[], object], timeout_s: float) -> bool:
    """Run `call` beside; the SDK's own time limits do not cover an export in flight."""
    thread = threading.Thread(target=call, name="telemetry-flush", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class FleetMetrics:
    """An ingress's view of its workers, as Prometheus metrics.

    Labels are bounded by the configuration and the membership: `keep_only` drops the series of
    workers that have left.

    Args:
        registry: what `GET /metrics` renders; None makes one.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = registry or CollectorRegistry()
        self._workers: set[tuple[str, str, str]] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._stores: set[tuple[str, str, str, str]] = set()

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
        self._requests = gauge("worker_requests_bytes", "Prompts on it", *worker)
        self._link = gauge("worker_link_buffer_bytes", "Waiting to be sent to it", *worker)
        self._step_error = gauge(
            "worker_step_time_error", "Median of recent predictions, a fraction", *worker
        )
        self._drafted = gauge("worker_draft_tokens", "Verified in drafts, so far", *worker)
        self._accepted = gauge("worker_accepted_draft_tokens", "Of these, right", *worker)
        self._index_nbytes = gauge("prefix_index_bytes", "Memory of what workers are known to have")
        self._index_blocks = gauge("prefix_index_blocks", "Blocks that workers are known to have")
        self._rate = gauge("kv_transfer_bytes_per_second", "Fitted", *pair)
        self._latency = gauge("kv_transfer_latency_seconds", "Fitted", *pair)
        self._moves = Counter(
            "disagg_request_moves",
            "Requests that went on elsewhere after a worker or a transfer failed",
            ("model_name",),
            registry=self.registry,
        )

    def request_moved(self, model: str) -> None:
        self._moves.labels(model).inc()

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

    def store(self, model: str, role: str, worker_id: str, num_blocks: Mapping[str, int]) -> None:
        """What became of blocks on their way to and from the store, by outcome."""
        for outcome, count in num_blocks.items():
            series = (model, role, worker_id, outcome)
            self._stores.add(series)
            self._store.labels(*series).set(count)

    def transfer(
        self, source_id: str, worker_id: str, *, latency_s: float, bytes_per_s: float
    ) -> None:
        """What a worker measured when it pulled from a source."""
        self._pairs.add((source_id, worker_id))
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
        for pair in [each for each in self._pairs if not set(each) <= set(worker_ids)]:
            self._pairs.remove(pair)
            self._rate.remove(*pair)
            self._latency.remove(*pair)
