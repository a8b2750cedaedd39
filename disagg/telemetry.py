"""Traces (OpenTelemetry, which only this file imports).

Tracing is off, and then nearly free, unless the standard variable OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set when `setup` runs; the SDK reads the other OTEL_*
variables itself. A span's parent is a W3C `traceparent` that travels in our messages, because
requests cross threads and processes that share no context variable. Nothing here blocks a caller or
fails a request: a bad header starts a new trace, an unreachable collector loses spans, and they are
counted (`num_dropped`).
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from disagg import semconv
from disagg.errors import DisaggError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, Tracer

Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes: TypeAlias = Mapping[str, Value]
Kind: TypeAlias = Literal["internal", "server", "client"]

CANCELLED = "disagg.cancelled"  # nobody waited for the rest of the work

_log = logging.getLogger(__name__)
_EXIT_TIMEOUT_S = 2.0
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACEPARENT_LEN = 55
_MAX_HEADER_LEN = 512
_SAMPLED = 0x01
_MAX_NUM_WAITING = 2048  # the SDK's default


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


class _Backlog:
    """Spans that have ended and are not exported yet, and those that were lost. For any thread.

    The limit is here and not in the SDK's queue, which loses spans without a count.
    """

    def __init__(self, max_num: int) -> None:
        self.max_num = max_num
        self.num_dropped = 0
        self._num_waiting = 0
        self._lock = threading.Lock()

    def add(self) -> bool:
        """Whether there is room for one more; otherwise it is lost."""
        with self._lock:
            has_room = self._num_waiting < self.max_num
            if has_room:
                self._num_waiting += 1
            else:
                self.num_dropped += 1
            return has_room

    def exported(self, num: int, *, has_arrived: bool) -> None:
        with self._lock:
            self._num_waiting -= num
            if not has_arrived:
                self.num_dropped += num


class _Tracing:
    """What exists only while tracing is on."""

    def __init__(self, provider: TracerProvider, backlog: _Backlog) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context

        self.provider = provider
        self.backlog = backlog
        captured = os.environ.get(_CAPTURE_VARIABLE, "").strip().lower()
        self.captures_content = captured in ("true", "span_only", "span_and_event")
        self.tracer: Tracer = provider.get_tracer("disagg", schema_url=semconv.SCHEMA_URL)
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

    def end(self, span: OtelSpan, end_ns: int | None = None) -> None:
        if span.is_recording() and self.backlog.add():
            span.end(end_ns)

    def fail(self, span: OtelSpan, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            span.record_exception(error)
        span.set_attribute(semconv.ERROR_TYPE, error_type(error))
        span.set_status(self._trace.StatusCode.ERROR, str(error))


def error_type(error: BaseException | str) -> str:
    """The name of a kind of errors: the code that clients see, or the class of a bug."""
    if isinstance(error, DisaggError):
        return error.code
    return semconv.OTHER if isinstance(error, str) else type(error).__qualname__


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

    def set_all(self, attributes: Attributes) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def fail(self, error: BaseException | str) -> None:
        """Mark the work as failed. An `Exception` that leaves the `with` block does it as well."""
        if self._tracing is not None and self._span is not None:
            self._tracing.fail(self._span, error)

    def end(self) -> None:
        """End work that does not fit into a `with` block."""
        if self._tracing is not None and self._span is not None:
            self._tracing.end(self._span)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.fail(error)
        elif error is not None:  # a cancelled task or a closed generator: the client went away
            self.set(CANCELLED, True)
        self.end()


NO_SPAN = Span(None, None, "")


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
    tracing.end(done, int(max(start_unix_s, end_unix_s) * 1e9))
    return _format(done.get_span_context())


def setup(service_name: str, attributes: Attributes | None = None) -> bool:
    """Turn tracing on if the environment asks for it. Once per process; later calls do nothing.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over the arguments. Returns whether
    tracing is on.
    """
    global _tracing
    if _tracing is None and _wanted():
        size = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip()
        backlog = _Backlog(int(size) if size.isdigit() else _MAX_NUM_WAITING)
        named = {"service.name": service_name, **(attributes or {})}
        _tracing = _Tracing(_provider(named, backlog), backlog)
        atexit.register(shutdown)
    return _tracing is not None


def enabled() -> bool:
    """Whether spans go anywhere; for callers whose attributes are costly to compute."""
    return _tracing is not None


def captures_content() -> bool:
    """Whether prompts and answers are to be in spans, which only an explicit setting says."""
    return _tracing is not None and _tracing.captures_content


def num_dropped() -> int:
    """Number of spans that were lost, because the collector is slow, away or refuses them."""
    return 0 if _tracing is None else _tracing.backlog.num_dropped


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


def _provider(attributes: Attributes, backlog: _Backlog) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            try:
                result = super().export(spans)
                return result
            finally:
                backlog.exported(len(spans), has_arrived=result is SpanExportResult.SUCCESS)

    resource = Resource.create(attributes).merge(OTELResourceDetector().detect())
    # The SDK's own exit hook may wait for half a minute; ours is bounded.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Exporter(), max_queue_size=backlog.max_num))
    return provider


def _format(of: SpanContext) -> str:
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-{int(of.trace_flags) & _SAMPLED:02x}"


def _bounded(call: Callable[[], object], timeout_s: float) -> bool:
    """Run `call` beside; the SDK's own time limits do not cover an export in flight."""
    thread = threading.Thread(target=call, name="telemetry-flush", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
