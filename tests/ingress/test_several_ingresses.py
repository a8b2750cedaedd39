"""Several ingresses answer for all: what each counts is shown once, whoever is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as MetricSample

from disagg import local
from disagg.api.http.metrics import join_expositions
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.ingress.core import IngressCore
from disagg.ingress.fleet_state import PERIOD_S, ModelSample, Sample, ShownFleet, add_fleets
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
        return [await getattr(core.monitoring, method)(*args) for core in others]

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


def samples(reply: httpx.Response) -> Iterator[MetricSample]:
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


async def test_any_ingress_shows_the_whole_fleet(clients: dict[str, httpx.AsyncClient]) -> None:
    for name, client in clients.items():
        shown = (await client.get("/debug/fleet?since=0")).json()
        assert shown["ingress"] == name and len(shown["workers"]) == 2
        (model,) = shown["models"]
        assert model["totals"]["num_first"] == sum(NUM_ASKED.values())
        assert sum(model["totals"]["prefills"].values()) == sum(NUM_ASKED.values())


def test_rates_of_several_ingresses_are_added() -> None:
    def fleet(unix_s: float, requests_per_s: float, ttft_s: float | None) -> bytes:
        rates = {"tiny": ModelSample(requests_per_s, 2.0, ttft_s, 0.5)}
        sample = Sample(unix_s, rates, {}, {"worker": (1, 0.5)}, 8.0)
        shown = ShownFleet("", 0.0, [], [], [], {"no_room": 1.0}, {}, PERIOD_S, [sample])
        return msgspec.json.encode(shown)

    fleets = [fleet(100.0, 3.0, 1.0), fleet(102.0, 1.0, 5.0), fleet(101.0, 0.0, None)]
    added = msgspec.json.decode(add_fleets([*fleets, fleet(50.0, 9.0, 9.0)]), type=ShownFleet)
    assert added.refused == {"no_room": 4.0}
    (sample,) = added.history
    assert sample.models == {"tiny": ModelSample(4.0, 6.0, 2.0, 0.5)}
    assert (sample.workers, sample.kv_bytes_per_s) == ({"worker": (1, 0.5)}, 8.0)


def test_a_series_that_several_texts_have_is_the_first_ones() -> None:
    head_a, head_b = "# HELP a A.\n# TYPE a gauge\n", "# HELP b B.\n# TYPE b gauge\n"
    one = f'{head_a}a{{x="}} 1"}} 1.0\n{head_b}b 2.0\n'
    two = f'{head_b}b 3.0\n{head_a}a{{x="}} 1"}} 4.0\na{{x="\\""}} 5.0\n'
    both = f'{head_a}a{{x="}} 1"}} 1.0\na{{x="\\""}} 5.0\n{head_b}b 2.0\n'
    assert join_expositions([one.encode(), two.encode()]).decode() == both
