"""A collector for tests: receives OTLP over HTTP on a free loopback port and keeps the spans.

with OtlpCollector() as collector:
    ...  # processes started with OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint
    collector.wait_for(lambda spans: any(span.name == "decode" for span in spans))
"""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from disagg import telemetry


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_id: str  # 16 hex digits, or "" for the root of a trace
    kind: str  # "INTERNAL", "SERVER", "CLIENT"
    start_unix_s: float
    end_unix_s: float
    attributes: dict[str, Any]
    failed: bool
    status_message: str
    event_names: tuple[str, ...]
    resource: dict[str, Any] = field(repr=False)
    schema_url: str = ""  # the version of the conventions for its names

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class OtlpCollector:
    """Serves `POST /v1/traces`. `.spans` is what has arrived so far, in order of arrival."""

    def __init__(self, status: int = 200) -> None:
        self.num_exports = 0
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                ok = status == 200 and self.path == "/v1/traces"
                if ok:
                    collector._receive(body)
                self.send_response(status if self.path == "/v1/traces" else 404)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def wait_for(
        self, enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 60.0
    ) -> list[ReceivedSpan]:
        """Spans as soon as `enough(spans)`; fails with the names that came when they are not."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not enough(self._spans):
                left_s = deadline - time.monotonic()
                names = sorted({span.name for span in self._spans})
                assert left_s > 0, f"not enough spans within {timeout_s} s; there are {names}"
                self._changed.wait(left_s)
            return list(self._spans)

    def __enter__(self) -> OtlpCollector:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _receive(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.num_exports += 1
            for resource_spans in request.resource_spans:
                resource = _attributes(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    url = scope_spans.schema_url
                    self._spans += [_received(span, resource, url) for span in scope_spans.spans]
            self._changed.notify_all()


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    """A collector to which this process sends its spans."""
    with OtlpCollector() as collector:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        assert telemetry.setup("disagg-test")
        try:
            yield collector
        finally:
            telemetry.shutdown()


@contextmanager
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A collector that accepts connections and never answers. Turns tracing off at its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        yield
        telemetry.shutdown(timeout_s=0.05)
    for thread in threading.enumerate():
        if thread.name == "telemetry-flush":  # it ends when its export has failed
            thread.join(60)
            assert not thread.is_alive()


def _received(span: Span, resource: dict[str, Any], schema_url: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start_unix_s=span.start_time_unix_nano / 1e9,
        end_unix_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        status_message=span.status.message,
        event_names=tuple(event.name for event in span.events),
        resource=resource,
        schema_url=schema_url,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    typed: list[KeyValue] = list(pairs)
    return {pair.key: _value(pair.value) for pair in typed}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
