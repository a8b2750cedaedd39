"""A prefix that was evicted everywhere comes back from Redis, and the answer stays the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis

from disagg.blocks import BlockHash, hash_blocks, hash_root
from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.config import EngineConfig
from disagg.config_checks import parse_config
from disagg.local import LocalCluster, running
from tests.e2e.single_engine import SingleEngine
from tests.router.fakes import held_by
from tests.tiny_model import write_tiny_model

PROMPT = "the prefix that must survive its own eviction: " * 9
NUM_PIECES = 2  # of a block in Redis: KV heads of the tiny model
NUM_OTHERS = 6  # enough other prompts to evict everything from caches of 40 blocks
# A lookup that takes longer than computing is given up, as it should be; on a busy machine one may.
NUM_ATTEMPTS = 5


async def chat(client: httpx.AsyncClient, content: str) -> tuple[str, int]:
    """The greedy answer, and how many prompt tokens were not computed."""
    answer = await client.post(
        "/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 8,
        },
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    num_cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["message"]["content"], num_cached


def prefix_of(cluster: LocalCluster, prompt: str = PROMPT) -> list[BlockHash]:
    """The names of the prompt's blocks."""
    model = cluster.ingress.service.model("tiny")
    assert model.template is not None
    messages = [{"role": "user", "content": prompt}]
    text = model.template.render(messages, add_generation_prompt=True, arguments={})
    root = hash_root(model.fingerprint, model.block_size, "/")
    return hash_blocks(root, model.tokenizer.encode_chat(text), model.block_size)


async def keys_of(names: list[BlockHash], client: redis.Redis) -> list[bytes]:
    """Where the blocks are in Redis; waits for the store's thread, which writes behind."""
    while True:
        keys = [key for key in client.keys(b"*") if isinstance(key, bytes)]
        found = [key for name in names for key in keys if key.endswith(b":" + name)]
        if len(found) == NUM_PIECES * len(names):
            return found
        await asyncio.sleep(0.02)


def blocks(metrics: str, outcome: str) -> float:
    """What became of blocks, summed over workers."""
    pattern = rf'^disagg_worker_store_blocks_total{{.*outcome="{outcome}".*}} (.*)$'
    return sum(float(count) for count in re.findall(pattern, metrics, re.MULTILINE))


def leave(client: redis.Redis, keys: list[bytes]) -> None:
    pass


def damage(client: redis.Redis, keys: list[bytes]) -> None:
    """A bit in the middle of every value."""
    for key in keys:
        value = client.get(key)
        assert isinstance(value, bytes)
        middle = len(value) // 2
        client.set(key, value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :])


def swap(client: redis.Redis, keys: list[bytes]) -> None:
    """Every value is a sound one, of another place in the same prompt."""
    values = [client.get(key) for key in keys]
    for key, value in zip(keys, [*values[1:], values[0]], strict=True):
        assert isinstance(value, bytes)
        client.set(key, value)


@pytest.mark.parametrize(("happens", "comes_back"), [(leave, True), (damage, False), (swap, False)])
async def test_an_evicted_prefix_comes_back_sound_or_not_at_all(
    happens: Callable[[redis.Redis, list[bytes]], None], comes_back: bool, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")
    engine = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 40}
    # One worker, so that the other prompts go where the first one is cached.
    tier = {
        "model": str(model),
        "served_model_name": "tiny",
        "engine": engine,
        "prefill": {"num_replicas": 0},
    }
    expected = SingleEngine(model, EngineConfig(dtype="float32", num_threads=1)).chat(PROMPT, 8)
    with (
        EmbeddedRedis(tmp_path / "redis", rules="~* +@all") as server,
        redis.Redis.from_url(server.url) as values,
    ):
        config = parse_config(
            {
                "tiers": [tier],
                "cluster_key": "a key of this test",
                "redis_url": server.url,
            }
        )
        async with running(config) as cluster:
            names = prefix_of(cluster)
            transport = httpx.ASGITransport(app=cluster.ingress.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                assert await chat(client, PROMPT) == (expected, 0)
                for _ in range(NUM_ATTEMPTS):
                    for number in range(NUM_OTHERS):
                        await chat(client, f"{number}: something else, as long as it; " * 11)
                    assert not held_by(cluster.ingress.fleet.index, names), "it is still in a cache"
                    happens(values, await keys_of(names, values))
                    text, num_cached = await chat(client, PROMPT)
                    assert text == expected
                    if num_cached or not comes_back:
                        break
                metrics = (await client.get("/metrics")).text
            assert num_cached > 300 if comes_back else num_cached == 0
            hits = blocks(metrics, "hit")  # those of a lookup that was given up included
            assert hits >= num_cached // 16 if comes_back else hits == 0
            assert blocks(metrics, "stored") >= len(names)
            for worker in cluster.workers:
                await worker.check()
