from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from disagg import semconv, telemetry
from disagg.errors import DeadlineExceeded
from disagg.telemetry import TraceParent, error_type, parse_traceparent, record_span, span
from tests.otlp_collector import OtlpCollector, silent

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import os

    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield
    telemetry.shutdown()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        yield running
        telemetry.shutdown()


def test_a_valid_traceparent_is_parsed() -> None:
    parsed = parse_traceparent(PARENT)
    assert parsed == TraceParent(int(TRACE, 16), 0xB7AD6B7169203331, True)
    unsampled = parse_traceparent(UNSAMPLED)
    assert unsampled is not None and not unsampled.sampled
    later_version = parse_traceparent(f"cc-{TRACE}-b7ad6b7169203331-03-what-comes-later")
    assert later_version is not None and later_version.sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        PARENT.upper(),
        PARENT + "-more",
        PARENT + "\n",
        PARENT[:-1],
        f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"cc{PARENT[2:]}-{'x' * 10_000}",
        "é" * 55,
    ],
)
def test_an_invalid_traceparent_starts_a_new_trace(header: str, collector: OtlpCollector) -> None:
    assert parse_traceparent(header) is None
    telemetry.setup("test")
    with span("root", header) as work:
        assert parse_traceparent(work.traceparent) is not None
    record_span("recorded", header, 1.0, 2.0)
    assert telemetry.flush()
    assert [got.parent_id for got in collector.spans] == ["", ""]
    assert TRACE not in {got.trace_id for got in collector.spans}


def test_off_by_default_hands_the_trace_on_and_imports_nothing() -> None:
    check = (
        "import sys; from disagg import telemetry as t\n"
        "assert not t.setup('x') and not t.enabled()\n"
        f"with t.span('a', '{PARENT}') as work: work.set('k', 1); work.fail('no')\n"
        f"assert work.traceparent == '{PARENT}' == t.record_span('b', '{PARENT}', 1.0, 2.0)\n"
        "assert t.span('a', 'x' * 9999).traceparent == ''\n"
        "assert t.flush() and t.shutdown()\n"
        "assert not any(m.startswith(('opentelemetry', 'prometheus')) for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, env={})


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_the_standard_variables_turn_it_off(
    name: str, value: str, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert not telemetry.setup("test")


def test_an_unsupported_exporter_or_protocol_is_said(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert not telemetry.setup("test")
    assert "zipkin" in caplog.text
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert telemetry.setup("test")
    assert "http/protobuf" in caplog.text


def test_children_reach_the_collector_beneath_their_parents(collector: OtlpCollector) -> None:
    assert telemetry.setup("disagg-test", {"disagg.role": "decode"})
    with span("request", PARENT, {"n": 3, "names": ["a", "b"]}, kind="server") as request:
        request.set("late", True)
        with span("route", request.traceparent) as route:
            assert route.traceparent != request.traceparent
    below = record_span("kv.pull", request.traceparent, 1000.25, 1001.5, {"nbytes": 7})
    record_span("copy", below, 1000.5, 1000.75)
    assert telemetry.flush()
    by_name = {got.name: got for got in collector.spans}
    assert by_name.keys() == {"request", "route", "kv.pull", "copy"}
    assert {got.trace_id for got in collector.spans} == {TRACE}
    root = by_name["request"]
    assert (root.parent_id, root.kind) == ("b7ad6b7169203331", "SERVER")
    assert root.traceparent == request.traceparent
    assert root.attributes == {"n": 3, "names": ["a", "b"], "late": True}
    assert by_name["route"].parent_id == by_name["kv.pull"].parent_id == root.span_id
    assert by_name["copy"].parent_id == by_name["kv.pull"].span_id
    pull = by_name["kv.pull"]
    assert (pull.start_unix_s, pull.end_unix_s) == (1000.25, 1001.5)
    assert root.resource["service.name"] == "disagg-test"
    assert root.resource["disagg.role"] == "decode"
    assert root.schema_url == semconv.SCHEMA_URL


def test_the_environment_names_the_service(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
    telemetry.setup("disagg-test")
    record_span("one", "", 1.0, 2.0)
    assert telemetry.flush()
    (got,) = collector.spans
    assert got.resource["service.name"] == "my-llm"
    assert got.resource["deployment.environment"] == "prod"


def test_sampling_follows_the_parent(collector: OtlpCollector) -> None:
    telemetry.setup("test")
    with span("dropped", UNSAMPLED) as work:
        pass
    below = record_span("dropped.too", work.traceparent, 1.0, 2.0)
    assert work.traceparent.startswith(f"00-{TRACE}-") and work.traceparent.endswith("-00")
    assert below.endswith("-00")
    record_span("kept", PARENT, 1.0, 2.0)
    assert telemetry.flush()
    assert [got.name for got in collector.spans] == ["kept"]


def test_the_sampler_of_the_environment_is_used(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    telemetry.setup("test")
    record_span("dropped", PARENT, 1.0, 2.0)
    assert telemetry.flush()
    assert collector.num_exports == 0


def test_failures_show(collector: OtlpCollector) -> None:
    telemetry.setup("test")
    with pytest.raises(ValueError, match="boom"), span("raises"):
        raise ValueError("boom")
    with span("says") as work:
        work.fail("worker went away")
    record_span("recorded", "", 1.0, 2.0, error=RuntimeError("late"))
    with pytest.raises(asyncio.CancelledError), span("cancelled"):
        raise asyncio.CancelledError
    assert telemetry.flush()
    by_name = {got.name: got for got in collector.spans}
    assert by_name["raises"].failed and by_name["raises"].status_message == "boom"
    assert by_name["raises"].attributes["error.type"] == "ValueError"
    assert by_name["raises"].event_names == ("exception",)
    assert by_name["says"].failed and by_name["says"].status_message == "worker went away"
    assert by_name["recorded"].failed
    assert not by_name["cancelled"].failed and by_name["cancelled"].attributes["disagg.cancelled"]


def test_many_threads_record_at_once(collector: OtlpCollector) -> None:
    telemetry.setup("test")
    threads = [
        threading.Thread(target=lambda: [record_span("step", PARENT, 1.0, 2.0) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert telemetry.shutdown(timeout_s=60)
    assert len({got.span_id for got in collector.named("step")}) == 800


def test_shutdown_sends_what_is_queued_and_setup_works_again(collector: OtlpCollector) -> None:
    telemetry.setup("test")
    record_span("first", "", 1.0, 2.0)
    assert telemetry.shutdown()
    assert not telemetry.enabled()
    record_span("lost", "", 1.0, 2.0)
    assert telemetry.setup("test")
    record_span("second", "", 1.0, 2.0)
    assert telemetry.shutdown()
    assert [got.name for got in collector.spans] == ["first", "second"]


def test_a_collector_that_never_answers_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent(monkeypatch):
        telemetry.setup("test")
        record_span("one", "", 1.0, 2.0)
        assert not telemetry.flush(timeout_s=0.05)
        assert not telemetry.shutdown(timeout_s=0.05)


def test_a_refusing_collector_costs_only_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with OtlpCollector(status=400) as refusing:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing.endpoint)
        telemetry.setup("test")
        for _ in range(3):
            record_span("one", "", 1.0, 2.0)
        record_span("not sampled", UNSAMPLED, 1.0, 2.0)
        assert telemetry.flush(timeout_s=60)
        assert (telemetry.num_dropped(), refusing.spans) == (3, [])
        assert telemetry.shutdown(timeout_s=60)
    assert "400" in caplog.text


def test_spans_for_which_there_is_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with silent(monkeypatch):
        telemetry.setup("test")
        threads = [
            threading.Thread(target=lambda: [record_span("a", "", 1.0, 2.0) for _ in range(10)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert telemetry.num_dropped() == 40 - 16, "also those that are being sent take room"


def test_off_costs_a_handful_of_calls() -> None:
    """No look at the environment, no parsing, no import: what makes it cheap can be counted."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        with span("step", PARENT):
            pass
        record_span("decode", PARENT, 1.0, 2.0)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 10, calls


def test_names_are_those_of_the_conventions() -> None:
    """As the installed package has them, whose GenAI part is older than its own repository."""
    import importlib
    import pkgutil

    from opentelemetry.semconv._incubating import attributes, metrics

    known = {
        value
        for package in (attributes, metrics)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, str)
    }
    used = [value for value in vars(semconv).values() if isinstance(value, str) and "." in value]
    names = {name for name in used if name.partition(".")[0] in ("error", "http", "gen_ai", "url")}
    assert len(names) > 20 and names <= known, names - known


def test_errors_are_named_as_clients_see_them() -> None:
    assert error_type(DeadlineExceeded("late")) == "deadline_exceeded"
    assert error_type(KeyError("x")) == "KeyError"
    assert error_type("a sentence") == "_OTHER"
