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
from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from disagg.time_model import StepTimeModel
from tests.e2e.single_engine import SingleEngine
from tests.test_local import ENGINE
from tests.test_local_cold_tier import PROMPT, blocks, chat, damage, keys_of, prefix_of
from tests.test_local_host_tier import COMPUTE_S, OTHERS

SECOND = "another prefix, which a worker of two ranks stores: " * 8
HALF_GIB = 0.00012  # of host memory: half of a prompt's blocks, so that they go through it


@pytest.fixture(autouse=True)
def _slow_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a load may take longer than computing, and would be given up."""
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda model, num_new, num_before=0: COMPUTE_S)


class Worker:
    """The only one of a cluster. Each answer is compared with that of one engine."""

    def __init__(
        self, cluster: LocalCluster, client: httpx.AsyncClient, answers: dict[str, str]
    ) -> None:
        self._cluster, self._client, self._answers = cluster, client, answers

    async def ask(self, content: str) -> int:
        """Returns how many tokens of the prompt were not computed."""
        text, num_cached = await chat(self._client, content)
        assert text == self._answers[content]
        return num_cached

    async def evict(self) -> None:
        """So many other prompts that nothing of those before stays in the cache."""
        for content in OTHERS:
            await self.ask(content)

    async def stored(self, content: str, values: redis.Redis) -> list[bytes]:
        """The keys of a prompt's blocks in Redis, when all of them are there."""
        return await keys_of(prefix_of(self._cluster, content), values)

    async def num_blocks(self, outcome: str) -> float:
        return blocks((await self._client.get("/metrics")).text, outcome)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis", rules="~* +@all") as server:
        yield server


@asynccontextmanager
async def worker_of(
    num_ranks: int,
    model: Path,
    answers: dict[str, str],
    server: EmbeddedRedis,
    offloading_gib: float = 0.0,
) -> AsyncIterator[Worker]:
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
            yield Worker(cluster, client, answers)
            (worker,) = cluster.workers
            await worker.check()


async def comes_back(worker: Worker, content: str) -> None:
    """From Redis. Other prompts follow over the same blocks."""
    num_cached = await worker.ask(content)
    assert num_cached > 300
    assert await worker.num_blocks("hit") >= num_cached // 16
    await worker.evict()


async def test_what_a_worker_stored_comes_back_to_one_of_any_size_unless_a_part_is_damaged(
    model: Path, server: EmbeddedRedis
) -> None:
    """From one rank to two, and from two, through host memory, to one and to two.

    Of the damaged blocks the first rank's part is there and sound.
    """
    alone = SingleEngine(model, ENGINE)
    answers = {content: alone.chat(content, 8) for content in (PROMPT, SECOND, *OTHERS)}
    common = model, answers, server
    with redis.Redis.from_url(server.url) as values:
        async with worker_of(1, *common) as one:
            assert await one.ask(PROMPT) == 0
            await one.evict()
            await one.stored(PROMPT, values)
        async with worker_of(2, *common, offloading_gib=HALF_GIB) as two:
            await comes_back(two, PROMPT)
            assert await two.ask(SECOND) == 0
            await two.evict()
            keys = await two.stored(SECOND, values)
        async with worker_of(1, *common) as one:
            await comes_back(one, SECOND)
        async with worker_of(2, *common) as two:
            await comes_back(two, SECOND)
            damage(values, [key for key in keys if b":1:" in key])
            assert await two.ask(SECOND) == 0
            assert await two.num_blocks("damaged") >= 1
            await two.evict()
            assert len(await two.stored(SECOND, values)) == len(keys), "it is stored once more"
