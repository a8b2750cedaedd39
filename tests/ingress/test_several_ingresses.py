"""Several ingresses answer for all: what each counts is shown once, whoever is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from disagg import local
from disagg.api.http.exposition import joined
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.ingress.core import IngressCore
from tests.links.fakes import until
from tests.test_local import ENGINE, chat
from tests.tiny_model import tiny_parts

IDS = ("one", "two", "three")
NUM_ASKED = {"one": 1, "two": 2, "three": 0}
OPEN = {"accept": "application/openmetrics-text"}


@pytest.fixture
async def clients(model: Path) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """Of three ingresses with the same two workers, of which each has answered some requests."""
    pool = PoolConfig(num_replicas=1)
    tier = TierConfig(model=str(model), engine=ENGINE, prefill=pool, decode=pool, ttft_slo_s=None)
    config = ServeConfig(tiers=(tier,), transport="local", cluster_key="key", num_ingress=3)
    cores: dict[str, IngressCore] = {}

    async def ask_others(asker: str, method: str, *args: Any) -> list[Any]:
        others = (core for name, core in cores.items() if name != asker)
        return [await getattr(core.app, method)(*args) for core in others]

    async with local.running(config, tiny_parts()) as running, AsyncExitStack() as stack:
        for name in IDS:

            async def ask(method: str, *args: Any, asker: str = name) -> list[Any]:
                return await ask_others(asker, method, *args)

            core = cores[name] = IngressCore(config, name, ask_others=ask)
            stack.push_async_callback(core.close)
            core.update([worker.record for worker in running.workers])
        await until(lambda: all(len(core.fleet.view().workers) == 2 for core in cores.values()))
        found = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.ASGITransport(core.app), base_url="http://local")
            )
            for name, core in cores.items()
        }
        for name, number in NUM_ASKED.items():
            for _ in range(number):
                await chat(found[name], "Who are you?", 4)
        yield found


def samples(reply: httpx.Response) -> Iterator[Sample]:
    is_open = reply.headers["content-type"].startswith(OPEN["accept"])
    parse = (
        openmetrics.text_string_to_metric_families if is_open else text_string_to_metric_families
    )
    for family in parse(reply.text):
        yield from family.samples


@pytest.mark.parametrize("headers", [{}, OPEN], ids=["prometheus", "openmetrics"])
async def test_each_count_is_shown_once_whoever_is_asked(
    clients: dict[str, httpx.AsyncClient], headers: dict[str, str]
) -> None:
    for client in clients.values():
        found = list(samples(await client.get("/metrics", headers=headers)))
        series = [(each.name, tuple(sorted(each.labels.items()))) for each in found]
        assert len(series) == len(set(series))
        counts = {
            each.labels["ingress"]: each.value
            for each in found
            if each.name == "disagg_time_to_first_token_seconds_count"
        }
        assert counts == {name: number for name, number in NUM_ASKED.items() if number}
        workers = [each for each in found if each.name == "disagg_worker_kv_blocks"]
        assert len(workers) == 2 and "ingress" not in workers[0].labels
        buffers = [each for each in found if each.name == "disagg_worker_link_buffer_bytes"]
        assert sorted(each.labels["ingress"] for each in buffers) == sorted(IDS * 2)


async def test_an_ingress_can_be_asked_for_its_own(clients: dict[str, httpx.AsyncClient]) -> None:
    for name, client in clients.items():
        found = samples(await client.get("/metrics?ingress=own"))
        assert {each.labels["ingress"] for each in found if "ingress" in each.labels} == {name}


async def test_any_ingress_explains_a_request(clients: dict[str, httpx.AsyncClient]) -> None:
    answer = await chat(clients["two"], "Who are you?", 4)
    explained = [(await each.get(f"/debug/requests/{answer['id']}")) for each in clients.values()]
    assert {reply.status_code for reply in explained} == {200}
    assert len({reply.text for reply in explained}) == 1
    unknown = await clients["one"].get("/debug/requests/chatcmpl-unknown")
    assert unknown.status_code == 404


def test_a_series_that_several_texts_have_is_the_first_ones() -> None:
    head_a, head_b = "# HELP a A.\n# TYPE a gauge\n", "# HELP b B.\n# TYPE b gauge\n"
    one = f'{head_a}a{{x="}} 1"}} 1.0\n{head_b}b 2.0\n'
    two = f'{head_b}b 3.0\n{head_a}a{{x="}} 1"}} 4.0\na{{x="\\""}} 5.0\n'
    both = f'{head_a}a{{x="}} 1"}} 1.0\na{{x="\\""}} 5.0\n{head_b}b 2.0\n'
    assert joined([one.encode(), two.encode()]).decode() == both
