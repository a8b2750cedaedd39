"""What requests leave in a collector of traces, from the HTTP request to the last token."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import get_args

import httpx
import pytest

from disagg import local, telemetry
from disagg.api.http.request_spans import shown_tenant
from disagg.config import (
    CascadeConfig,
    HttpConfig,
    PoolConfig,
    ServeConfig,
    TenantConfig,
    TierConfig,
)
from disagg.errors import EngineFailed
from disagg.local import LocalCluster
from disagg.router.route import Cause
from disagg.worker import liveness
from tests.api.apps import Exchange, http_client, make_app
from tests.api.fakes import FakeGenerate
from tests.contract.contract import CHAT
from tests.links.fakes import until
from tests.otlp_collector import OtlpCollector, ReceivedSpan, silent, traced
from tests.test_local import ENGINE, LONG, body, chat, has_stepped, text, until_empty
from tests.test_metrics import metrics_of, total
from tests.tiny_model import tiny_parts, write_tiny_model

URL = "/v1/chat/completions"
PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"
TRACING = ("telemetry.py", "request_spans.py", "captured.py")
# In the tree: attributes whose values are the same each time.
SHOWN = (
    "http.response.status_code",
    "gen_ai.response.model",
    "gen_ai.response.finish_reasons",
    "error.type",
    "disagg.cancelled",
    "disagg.cascade.model",
)
KEYS = {each: f"the-key-of-{each}-alone" for each in ("ours", "theirs")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    return [write_tiny_model(place / name) for name in ("tiny", "larger")]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request leaves a worker that only waits for a CPU: trees are compared as a whole."""
    monkeypatch.setattr(liveness, "TURN_S", 60.0)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    with traced(monkeypatch) as collector:
        yield collector


@asynccontextmanager
async def served(
    *models: Path, num_prefill: int = 1, num_decode: int = 1
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """A fleet of tiers of these models, with a cascade if there are two; it is never sure."""
    tiers = tuple(
        TierConfig(
            model=str(each),
            engine=ENGINE,
            prefill=PoolConfig(num_replicas=num_prefill),
            decode=PoolConfig(num_replicas=num_decode),
        )
        for each in models
    )
    config = ServeConfig(
        tiers=tiers,
        cascade=CascadeConfig(thresholds=(0.0,), num_judged_tokens=2) if models[1:] else None,
        transport="local",
        cluster_key="key",
        http=HttpConfig(api_keys={**KEYS}),
        tenants={"ours": TenantConfig(min_ttft_slo_s=1e-6)},
    )
    async with (
        local.running(config, tiny_parts()) as running,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(running.ingress.app),
            base_url="http://fleet:8000",
            timeout=60,
            headers=authorization("ours"),
        ) as client,
    ):
        yield running, client


def authorization(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


@dataclass
class Trace:
    """The spans of one request."""

    spans: list[ReceivedSpan]

    def __getitem__(self, name: str) -> ReceivedSpan:
        return next(span for span in self.spans if span.name == name)

    @property
    def answer(self) -> ReceivedSpan:
        return next(span for span in self.spans if "gen_ai.operation.name" in span.attributes)

    def tree(self) -> str:
        """Names, in the order in which they began, with some attributes."""
        (root,) = (span for span in self.spans if not span.parent_id)
        return "\n".join([_line(root), *self._below(root, "")])

    def _below(self, parent: ReceivedSpan, indent: str) -> Iterator[str]:
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        children.sort(key=lambda span: (span.start_unix_s, span.end_unix_s))
        # A prompt's KV is pulled in one or several parts, which begin before, in or after a queue.
        pulls = [span for span in children if span.name == "kv.pull"]
        children = [span for span in children if span.name != "kv.pull"] + pulls[:1]
        for child in children:
            is_last = child is children[-1]
            yield f"{indent}{'└── ' if is_last else '├── '}{_line(child)}"
            yield from self._below(child, indent + ("    " if is_last else "│   "))


def _line(span: ReceivedSpan) -> str:
    shown = [f"{key}={span.attributes[key]}" for key in SHOWN if key in span.attributes]
    if span.attributes.get("disagg.route.cause") == "moved":
        shown.append("disagg.route.cause=moved")
    return "  ".join([span.name, *shown]).replace("'", "")


class Traces:
    """Takes the traces that a collector has received, each of them once."""

    def __init__(self, collector: OtlpCollector) -> None:
        self._collector = collector
        self._seen: set[str] = set()

    async def next(self, running: LocalCluster) -> Trace:
        """The trace of the last request since the last call."""
        for worker in running.workers:  # they may end their spans after the answer
            await until_empty(worker)
        assert telemetry.flush(30)
        new = [span for span in self._collector.spans if span.trace_id not in self._seen]
        self._seen |= {span.trace_id for span in new}
        last = max((span for span in new if not span.parent_id), key=lambda span: span.start_unix_s)
        return Trace([span for span in new if span.trace_id == last.trace_id])


async def remote_prefill(traces: Traces, models: list[Path]) -> Trace:
    async with served(models[0]) as (running, client):
        asked = body(LONG, 8, ignore_eos=True, seed=3, stop=["never"])
        reply = await client.post(URL, json=asked, headers={"user-agent": "tester"})
        trace = await traces.next(running)
    assert trace.answer.attributes["gen_ai.response.id"] == reply.json()["id"]
    return trace


async def escalation(traces: Traces, models: list[Path]) -> Trace:
    async with served(*models, num_prefill=0) as (running, client):
        await client.post(URL, json=body(LONG, 8, ignore_eos=True) | {"model": "auto"})
        return await traces.next(running)


async def refusal(traces: Traces, models: list[Path]) -> Trace:
    """While a worker is busy with another prompt, one comes that has no time to wait for it."""
    async with served(models[0], num_prefill=0) as (running, client):
        thread = running.workers[0]._thread
        is_held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            assert go_on.wait(60)

        thread.post(hold)
        await until(is_held.is_set)
        asking = asyncio.create_task(client.post(URL, json=body(LONG, 1)))
        await until(thread._messages.qsize, 60)
        reply = await client.post(URL, json=body("soon"), headers={"x-slo-ttft-ms": "0.01"})
        go_on.set()
        await asking
        assert reply.status_code == 429
        return await traces.next(running)


async def moved_stream(traces: Traces, models: list[Path]) -> Trace:
    async with served(models[0], num_prefill=0, num_decode=2) as (running, _):
        stream = await begun_stream(running, "ours")
        await running.stop_worker(next(filter(has_stepped, running.workers)))
        await stream.done
        assert "[DONE]" in stream.text
        return await traces.next(running)


async def left_stream(traces: Traces, models: list[Path]) -> Trace:
    async with served(models[0], num_prefill=0) as (running, _):
        stream = await begun_stream(running, "theirs")
        stream.hang_up()
        await stream.done
        return await traces.next(running)


async def begun_stream(running: LocalCluster, tenant: str) -> Exchange:
    asked = body(LONG, 200, stream=True, ignore_eos=True)
    stream = Exchange(running.ingress.app, asked, authorization(tenant))
    await until(lambda: len(stream.sent) > 3, 60)
    return stream


PLAYS = {
    "a chat that a prefill worker computed": remote_prefill,
    "a cascade that escalated": escalation,
    "a refusal": refusal,
    "a stream whose worker died": moved_stream,
    "a stream whose client left": left_stream,
}


async def test_the_page_shows_what_requests_leave(
    models: list[Path], collector: OtlpCollector
) -> None:
    traces = Traces(collector)
    found = {title: await play(traces, models) for title, play in PLAYS.items()}
    printed = "\n\n".join(f"# {title}\n{trace.tree()}" for title, trace in found.items())
    print(printed)  # for the page, when it is to change
    assert f"```\n{printed}\n```" in PAGE.read_text()


async def test_a_trace_is_found_by_answer_model_tenant_and_cause(
    models: list[Path], collector: OtlpCollector
) -> None:
    """And a tool for GenAI reads what was asked and answered; not the words of either."""
    trace = await remote_prefill(Traces(collector), models)
    answer_id = trace.answer.attributes.pop("gen_ai.response.id")
    assert answer_id.startswith("chatcmpl-")
    assert trace.answer.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "disagg",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ["never"],
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": trace["tokenize"].attributes["disagg.num_prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "disagg.tenant": "ours",
    }
    assert trace["route"].attributes["disagg.route.cause"] in get_args(Cause)
    http = trace["POST /v1/chat/completions"]
    assert (http.kind, trace.answer.kind) == ("SERVER", "INTERNAL")
    assert http.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": "fleet",
        "server.port": 8000,
        "user_agent.original": "tester",
    }


def test_only_configured_tenants_are_named() -> None:
    def tenant_class(tenant: str) -> str:
        return tenant if tenant == "ours" else "default"

    assert shown_tenant("ours", tenant_class) == "ours"
    assert shown_tenant("", tenant_class) == "default", "without keys there is one tenant"
    hashed = [shown_tenant(each, tenant_class) for each in ("jane@example.org", "x")]
    assert len({*hashed, "jane@example.org", "x", "default"}) == 5
    assert all(len(each) == 16 for each in hashed)


@pytest.mark.parametrize(
    ("method", "path", "status", "name", "error"),
    [
        ("GET", "/v1/models/tiny", 200, "GET /v1/models/{name}", None),
        ("GET", "/v1/models/none", 404, "GET /v1/models/{name}", "model_not_found"),
        ("GET", "/secret/of/someone", 404, "GET", "unknown_url"),
        ("BREW", "/v1/chat/completions", 405, "HTTP /v1/chat/completions", "method_not_supported"),
        ("POST", "/v1/chat/completions", 400, "POST /v1/chat/completions", "invalid_json"),
    ],
)
async def test_spans_are_named_by_routes_and_not_by_what_clients_send(
    method: str, path: str, status: int, name: str, error: str | None, collector: OtlpCollector
) -> None:
    async with http_client(make_app()) as client:
        headers = {"content-type": "application/json"}
        reply = await client.request(method, path, content=b"{", headers=headers)
    assert reply.status_code == status
    assert telemetry.flush(30)
    (span,) = collector.spans
    assert (span.name, span.failed) == (name, False), "the client's errors are not the server's"
    assert span.attributes.get("error.type") == error


async def test_an_error_of_the_server_is_one_of_its_span(collector: OtlpCollector) -> None:
    async with http_client(
        make_app(FakeGenerate(fail_after=0, error=EngineFailed("planted")))
    ) as client:
        assert (await client.post(URL, json=CHAT)).status_code == 500
    assert telemetry.flush(30)
    assert [(span.name, span.failed) for span in collector.spans] == [
        ("tokenize", False),
        ("chat tiny", True),
        ("POST /v1/chat/completions", True),
    ]
    assert {span.attributes["error.type"] for span in collector.spans[1:]} == {"engine_failed"}


@pytest.mark.parametrize("collector", ["frozen", "dead"])
async def test_streams_do_not_notice_a_collector_that_is_gone(
    collector: str, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its spans are lost, and counted."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    contents = [f"{number}: {LONG}" for number in range(6)]
    async with served(models[0]) as (_, client), asyncio.timeout(60):
        wanted = [text(await chat(client, content)) for content in contents]
        assert total((await metrics_of(client))["disagg_trace_spans_dropped"]) == 0
        with ExitStack() as stack:
            stack.enter_context(silent(monkeypatch))
            if collector == "dead":  # nobody listens on port 1
                monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
            assert telemetry.setup("disagg-test")
            answers = await asyncio.gather(*(chat(client, content) for content in contents))
            assert [text(answer) for answer in answers] == wanted
            while True:
                shown = await metrics_of(client)
                if total(shown["disagg_trace_spans_dropped"]) > 0:
                    break
                await chat(client, LONG)
            await chat(client, LONG)  # after which workers report once more
            shown = await metrics_of(client)
            assert total(shown["disagg_worker_trace_spans_dropped"], role="decode") > 0


@pytest.mark.parametrize("is_on", [False, True])
async def test_tokens_cost_no_tracing(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer calls no more of it than a short one."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(TRACING):
            calls.append(frame.f_code.co_name)

    async def num_calls(num_tokens: int) -> int:
        generate = FakeGenerate(finish=False)
        asked = CHAT | {"max_tokens": num_tokens, "stream": True}
        async with http_client(make_app(generate)) as client:
            calls.clear()
            sys.setprofile(count)
            try:
                reply = await client.post(URL, json=asked)
            finally:
                sys.setprofile(None)
        assert reply.text.count("data: ") > num_tokens
        return len(calls)

    with ExitStack() as stack:
        if is_on:
            stack.enter_context(traced(monkeypatch))
        assert 0 < await num_calls(4) == await num_calls(40)
