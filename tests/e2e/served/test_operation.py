"""It can be watched while it serves, and what breaks in it breaks alone."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping

import httpx
import openai
import pytest

from tests import plain_http
from tests.e2e.command import Command, until
from tests.e2e.served.operate import UNLUCKY_SEED
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import PROMPTS, assert_same_text, streamed, streams_of
from tests.otlp_collector import OtlpCollector, ReceivedSpan

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

HTTP, ANSWER = "POST /v1/chat/completions", "chat tiny"
SPANS = {
    HTTP,
    ANSWER,
    "tokenize",
    "route",
    "prefill.queue",
    "prefill.compute",
    "kv.pull",
    "decode.queue",
    "decode",
}
# Lines of a start.
WEIGHTS = r"weights .* of .* \(100 %\)"
BLOCKS = r"allocating [\d,]+ KV blocks; steps of up to \d+ sequences and [\d,]+ tokens"
NUM_WORKERS = 3 + 2  # of the two models


def test_a_trace_goes_through_all_processes(server: Command, collector: OtlpCollector) -> None:
    trace_ids: list[str] = []

    def ask() -> None:
        trace_ids.append(secrets.token_hex(16))
        content = f"traced request {len(trace_ids)}, of its own: " * 12
        answer = plain_http.post(
            f"{server.url}/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 8,
            },
            headers={"traceparent": f"00-{trace_ids[-1]}-b7ad6b7169203331-01"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text

    def through_all() -> dict[str, ReceivedSpan]:
        """Of the first trace that is complete; empty while none is. A worker that measured slow
        first steps gets no prompt yet, and spans come seconds later: meanwhile more is asked."""
        ask()
        time.sleep(0.5)
        traces = [{s.name: s for s in collector.spans if s.trace_id == each} for each in trace_ids]
        return next((trace for trace in traces if set(trace) >= SPANS), {})

    spans: dict[str, ReceivedSpan] = until(
        through_all, why=lambda: f"{sorted({span.name for span in collector.spans})}"
    )
    server_span, answer = spans[HTTP], spans[ANSWER]
    assert server_span.parent_id == "b7ad6b7169203331"
    assert answer.parent_id == server_span.span_id
    for name in SPANS - {HTTP, ANSWER}:
        assert spans[name].parent_id == answer.span_id, name
    pull = spans["kv.pull"].attributes
    assert pull["disagg.kv.num_blocks"] > 0 and pull["disagg.kv.nbytes"] > 0
    assert len({json.dumps(span.resource, sort_keys=True) for span in spans.values()}) == 3


def test_the_start_was_told_in_few_lines(server: Command) -> None:
    lines = server.messages()
    for pool in ("tiny-prefill", "tiny-decode: slowest of 2", "experts-prefill", "experts-decode"):
        for words in (WEIGHTS, BLOCKS, "warming up"):
            assert sum(bool(re.fullmatch(f"{pool}: {words}", line)) for line in lines) == 1, lines


def test_an_embedded_redis_that_dies_is_replaced(
    server: Command, client: openai.OpenAI, engines: Mapping[str, SingleEngine]
) -> None:
    (redis,) = server.named("valkey-server")
    redis.kill()
    while "Redis died; a new, empty one replaces it" not in server.output():
        assert_same_text(client, "tiny", engines["tiny"], "asked while there is no Redis " * 9)
    assert len(server.named("valkey-server")) == 1


def num_workers(server: Command) -> int:
    metrics = plain_http.get(f"{server.url}/metrics").text
    return metrics.count("disagg_worker_kv_cache_usage_perc{")


def test_metrics_and_probes(server: Command, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="counted", max_tokens=1)
    for path in ("/live", "/ready", "/health", "/version"):
        answer = plain_http.get(server.url + path, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["mine"]
    metrics = plain_http.get(f"{server.url}/metrics").text
    assert "disagg_prompt_tokens_total{" in metrics
    until(lambda: num_workers(server) == NUM_WORKERS)  # one that was killed may be away
    assert "disagg_kv_transfer_bytes_per_second{" in metrics


async def test_a_request_that_breaks_a_step_ends_alone(
    server: Command, engines: Mapping[str, SingleEngine]
) -> None:
    """Of every engine that would compute it: it is tried on one. No worker and no stream ends."""
    expected, answers = streams_of(engines["tiny"]), list[httpx.Response]()
    workers = set(server.named("ServeReplica"))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPTS[1]}],
        "seed": UNLUCKY_SEED,
        "logit_bias": {"5": 1.0},
        "max_tokens": 8,
    }

    def ask() -> None:
        url = f"{server.url}/v1/chat/completions"
        answers.extend(plain_http.post(url, json=body, timeout=60) for _ in range(3))

    assert await streamed(server.url, "tiny", ask) == expected
    for answer in answers:
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "request_failed"
        assert "planted" in error["message"] and answer.headers["x-request-id"]
    assert workers == set(server.named("ServeReplica"))
