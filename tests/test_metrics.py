"""`/metrics` of a whole system that served: what happened is counted, under names and with texts
that stand for themselves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from disagg import local, telemetry
from disagg.api.http.metrics import ApiMetrics
from disagg.config import PoolConfig, ServeConfig, TenantConfig, TierConfig
from tests.otlp_collector import OtlpCollector, traced
from tests.test_local import ENGINE, LONG, body
from tests.tiny_model import tiny_parts

# Beyond those of a histogram's buckets.
BOUNDED = {
    "model_name", "role", "worker_id", "source_id", "tenant", "lane", "outcome", "reason", "place",
    "state", "stage", "route", "code", "finish_reason", "le", "slo", "gen_ai_operation_name",
    "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model", "error_type",
}  # fmt: skip
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
STAGES = (
    "receive", "tokenize", "queue", "prefill_queue", "prefill_compute", "kv_pull", "decode_queue",
    "decode_first_step",
)  # fmt: skip


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    with traced(monkeypatch) as collector:
        yield collector


@pytest.fixture
async def client(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    tier = TierConfig(
        model=str(model),
        engine=ENGINE,
        prefill=PoolConfig(num_replicas=1),
        decode=PoolConfig(num_replicas=1),
    )
    config = ServeConfig(
        tiers=(tier,),
        transport="local",
        cluster_key="key",
        tenants={"paying": TenantConfig(weight=2.0)},
    )
    async with local.running(config, tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield client


async def metrics_of(client: httpx.AsyncClient) -> dict[str, Metric]:
    text = (await client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def open_metrics(text: str) -> dict[str, Metric]:
    families = openmetrics_parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return {family.name: family for family in families}


def total(family: Metric, suffix: str = "_total", **labels: str) -> float:
    """Of the series that have these labels."""
    return sum(
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )


async def test_a_request_is_counted_on_its_whole_way(client: httpx.AsyncClient) -> None:
    asked = body(LONG, 24, ignore_eos=True)
    slo = {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "none"}  # met on the busiest machine
    answer = await client.post("/v1/chat/completions", json=asked, headers=slo)
    usage = answer.json()["usage"]
    async with asyncio.timeout(120):  # the release of the hold is told after the answer
        while not total((await metrics_of(client))["disagg_worker_kv_holds_ended"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    shown = await metrics_of(client)
    assert total(shown["disagg_prefills"], place="remote") == 1
    for stage in STAGES:
        (count, seconds) = (
            total(shown["disagg_request_stage_seconds"], suffix, stage=stage)
            for suffix in ("_count", "_sum")
        )
        assert count == 1 and seconds >= 0.0, stage
    ttft = total(shown["disagg_time_to_first_token_seconds"], "_sum")
    of_first = STAGES[: STAGES.index("kv_pull")]
    parts = [total(shown["disagg_request_stage_seconds"], "_sum", stage=each) for each in of_first]
    assert 0.0 < sum(parts) <= ttft + 0.005, "they cannot take longer than what they are parts of"
    pulls = shown["disagg_worker_kv_pulls"]
    assert total(pulls, outcome="ok") >= 1 and total(pulls) == total(pulls, outcome="ok")
    num_blocks = -(-usage["prompt_tokens"] // 16)
    block_nbytes = total(shown["disagg_worker_kv_pull_bytes"]) / num_blocks
    assert block_nbytes > 0 and block_nbytes % (2 * 2 * 2 * 16 * 16 * 4) == 0, "keys and values"
    assert total(shown["disagg_worker_kv_holds_ended"], outcome="released") >= 1
    tokens = {"tenant": "default", "model_name": "tiny"}
    assert total(shown["disagg_prompt_tokens"], **tokens) == usage["prompt_tokens"]
    assert total(shown["disagg_generation_tokens"], **tokens) == 24
    assert total(shown["disagg_request_slo"], outcome="met", slo="request") == 1
    assert total(shown["disagg_workers"], "", state="serving") == 2


async def test_names_and_texts_stand_for_themselves(client: httpx.AsyncClient) -> None:
    """As Prometheus' conventions say, and as a stranger reads them."""
    await client.post("/v1/chat/completions", json=body(LONG, 4))
    shown = await metrics_of(client)
    for name, family in shown.items():
        assert not name.endswith("_created"), "a second series for each"
        assert name.startswith(("disagg_", "gen_ai_server_")), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert len(family.documentation) >= 30, f"{name}: {family.documentation!r}"
        assert not re.search(r"[Oo]f these|[Bb]eside these", family.documentation.split(".")[0])
        assert not re.search(r"_(ms|us|mb|kb|gb|percent|nbytes|total_total)(_|$)", name), name
        for sample in family.samples:
            assert set(sample.labels) <= BOUNDED, f"{sample.name}: {sample.labels}"
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens")), name
    texts = [family.documentation for family in shown.values()]
    assert len(set(texts)) == len(texts), "two have the same text"


async def test_who_asks_for_openmetrics_gets_the_same_in_its_format(
    client: httpx.AsyncClient, collector: OtlpCollector
) -> None:
    """With exemplars, which lead to the span of an answer."""
    await client.post("/v1/chat/completions", json=body(LONG, 4, ignore_eos=True))
    plain = await metrics_of(client)
    reply = await client.get("/metrics", headers={"accept": PROMETHEUS_ACCEPTS})
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    shown = open_metrics(reply.text)
    assert shown.keys() == plain.keys()
    assert telemetry.flush(30)
    (span,) = collector.named("chat tiny")
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        family = shown[f"gen_ai_server_{name}_seconds"]
        assert (
            total(family, "_count", gen_ai_request_model="tiny", gen_ai_provider_name="disagg") == 1
        )
        (exemplar,) = (each.exemplar for each in family.samples if each.exemplar is not None)
        assert exemplar.labels == {"trace_id": span.trace_id, "span_id": span.span_id}
        assert not any(each.exemplar for each in plain[family.name].samples)


async def test_there_is_no_exemplar_without_a_trace(client: httpx.AsyncClient) -> None:
    sampled = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    await client.post("/v1/chat/completions", json=body("short", 4), headers=sampled)
    text = (await client.get("/metrics", headers={"accept": PROMETHEUS_ACCEPTS})).text
    assert "gen_ai_server_request_duration_seconds_count{" in text and " # {" not in text


def test_metrics_of_another_process_are_translated() -> None:
    beside = b'# HELP other_total Others\n# TYPE other_total counter\nother_total{a="b"} 3\n'
    other = open_metrics(ApiMetrics().expose_open(beside).decode())["other"]
    assert (other.type, total(other, a="b")) == ("counter", 3)
