"""Evicted prefixes of workers of two ranks come back from Redis, to workers of other sizes too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import redis

from disagg import local
from disagg.blocks import BlockHash
from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from disagg.time_model import StepTimeModel
from tests.e2e.single_engine import SingleEngine
from tests.test_local import ENGINE
from tests.test_local_cold_tier import PROMPT, blocks, chat, damage, keys_of, prefix_of
from tests.test_local_host_tier import COMPUTE_S, OTHERS
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, str]:
    alone = SingleEngine(model, ENGINE)
    return {content: alone.chat(content, 8) for content in (PROMPT, *OTHERS)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis", rules="~* +@all") as server:
        yield server


@pytest.fixture(autouse=True)
def _slow_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a load may take longer than computing, and would be given up."""
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda model, num_new, num_before: COMPUTE_S)


@asynccontextmanager
async def worker_of(
    model: Path, server: EmbeddedRedis, num_ranks: int, offloading_gib: float = 0.0
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """A cluster with one worker of so many ranks."""
    engine = msgspec.structs.replace(
        ENGINE,
        tensor_parallel_size=num_ranks,
        num_gpu_blocks_override=40,
        kv_offloading_size=offloading_gib,
    )
    tier = TierConfig(
        model=str(model),
        served_model_name="tiny",
        engine=engine,
        prefill=PoolConfig(num_replicas=0),
    )
    config = ServeConfig(tiers=(tier,), transport="nixl", cluster_key="key", redis_url=server.url)
    async with local.running(config) as cluster:
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield cluster, client
            (worker,) = cluster.workers
            await worker.check()


async def store_prompt(
    model: Path,
    server: EmbeddedRedis,
    answers: dict[str, str],
    num_ranks: int,
    offloading_gib: float = 0.0,
) -> list[BlockHash]:
    """Have a worker compute the prompt and evict it to Redis. Returns its blocks' names."""
    async with worker_of(model, server, num_ranks, offloading_gib) as (cluster, client):
        for content in (PROMPT, *OTHERS):
            assert await chat(client, content) == (answers[content], 0)
        names = prefix_of(cluster)
        with redis.Redis.from_url(server.url) as values:
            await keys_of(names, values)
        return names


# The host memory has room for half of a prompt, so blocks go through it.
@pytest.mark.parametrize(
    ("num_ranks", "num_later", "offloading_gib"), [(1, 2, 0.0), (2, 1, 0.0), (2, 2, 0.00012)]
)
async def test_what_a_worker_stored_comes_back_to_one_of_any_size(
    num_ranks: int,
    num_later: int,
    offloading_gib: float,
    model: Path,
    server: EmbeddedRedis,
    answers: dict[str, str],
) -> None:
    await store_prompt(model, server, answers, num_ranks, offloading_gib)
    async with worker_of(model, server, num_later, offloading_gib) as (_, client):
        text, num_cached = await chat(client, PROMPT)
        assert text == answers[PROMPT] and num_cached > 300
        metrics = (await client.get("/metrics")).text
        assert blocks(metrics, "hit") >= num_cached // 16
        for content in OTHERS:  # over the same blocks
            assert (await chat(client, content))[0] == answers[content]


async def test_a_part_that_is_damaged_on_another_rank_is_computed(
    model: Path, server: EmbeddedRedis, answers: dict[str, str]
) -> None:
    """The first rank's part of each block is there and sound."""
    names = await store_prompt(model, server, answers, 2)
    with redis.Redis.from_url(server.url) as values:
        keys = await keys_of(names, values)
        damage(values, [key for key in keys if b":1:" in key])
        async with worker_of(model, server, 2) as (_, client):
            assert await chat(client, PROMPT) == (answers[PROMPT], 0)
            metrics = (await client.get("/metrics")).text
            assert blocks(metrics, "damaged") >= 1
            for content in OTHERS:
                await chat(client, content)
            assert len(await keys_of(names, values)) == len(keys), "it is stored once more"
