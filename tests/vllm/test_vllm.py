"""A fleet of real vLLM engines (CPU): two prefill and two decode workers, KV over NIXL.

Answers are greedy, in float32, and compared with those of one plain vLLM engine: 200 prompts, with
prefix hits, streams that clients close, pulls that fail, a worker that drains and an engine that is
killed.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

from disagg import local
from disagg.config import ASSETS, EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.host import free_port
from disagg.local import LocalCluster
from disagg.worker.vllm import tickets
from tests.links.fakes import until

MODEL = "demo-small"
BLOCK_SIZE, NUM_NEW, NUM_PROMPTS = 32, 24, 200
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "block_size": BLOCK_SIZE,
}


def prompts() -> list[list[int]]:
    """Some share a prefix of several blocks; their lengths lie also beside multiples of a block."""
    rng = random.Random(0)
    shared = [rng.choices(range(3, 1000), k=6 * BLOCK_SIZE) for _ in range(4)]
    made = []
    for number in range(NUM_PROMPTS):
        begin = shared[number % 4] if number % 2 else []
        length = rng.choice([5, 31, 32, 33, 63, 64, 65, 96, 127, 128, 200])
        made.append([*begin, *rng.choices(range(3, 1000), k=length)])
    return made


def _plain(asked: list[list[int]]) -> list[list[int]]:
    """In a process of its own, as an engine does not give everything back."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(ASSETS / MODEL), **COMMON)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": each} for each in asked], greedy)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    engine.llm_engine.engine_core.shutdown()  # or this process waits for that of the engine
    return answers


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_plain, prompts()).result()


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    tier = TierConfig(
        model=MODEL,
        engine=EngineConfig(backend="vllm", **COMMON),
        prefill=PoolConfig(num_replicas=2),
        decode=PoolConfig(num_replicas=2),
        ttft_slo_s=None,
    )
    async with local.running(ServeConfig(tiers=(tier,), cluster_key="key")) as cluster:
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://v", timeout=300) as client:
            yield cluster, client


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every fourth ticket that is used, with an engine that nobody is instead of its own."""
    redeem, used, found = tickets.redeem, itertools.count(1), list[dict[str, Any]]()

    def redeemed(*given: Any) -> dict[str, Any]:
        params = redeem(*given)
        if params and next(used) % 4 == 0:
            params = {**params, "remote_engine_id": f"{len(found)}", "remote_port": free_port()}
            found.append(params)
        return params

    monkeypatch.setattr(tickets, "redeem", redeemed)
    return found


@pytest.mark.timeout(1800)
async def test_two_hundred_answers_are_those_of_one_engine(
    expected: list[list[int]], broken: list[dict[str, Any]]
) -> None:
    asked = prompts()
    async with fleet() as (cluster, client):
        places = asyncio.Semaphore(8)

        async def one(number: int) -> dict[str, Any]:
            async with places:
                return await ask(client, asked[number])

        async def closed(number: int) -> None:
            """A client that does not wait for its answer."""
            async with places:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await ask(client, asked[number])

        running = [asyncio.create_task(one(number)) for number in range(NUM_PROMPTS)]
        leaving = [asyncio.create_task(closed(number)) for number in range(0, NUM_PROMPTS, 20)]
        await until(lambda: sum(task.done() for task in running) > NUM_PROMPTS // 4, 600)
        await cluster.stop_worker(cluster.workers[0], drain_s=4.0)
        await until(lambda: sum(task.done() for task in running) > NUM_PROMPTS // 2, 600)
        victim = _engines()[-1]  # of the last decode worker
        victim.kill()
        answers = await asyncio.gather(*running)
        await asyncio.gather(*leaving)
        found = [answer["choices"][0]["token_ids"] for answer in answers]
        wrong = [number for number in range(NUM_PROMPTS) if found[number] != expected[number]]
        assert not wrong and broken
        cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
        assert sum(each >= 6 * BLOCK_SIZE for each in cached) > 0
        routes = [cluster.ingress.dispatcher.decision(each["id"])[-1].route for each in answers]
        assert any(route.prefill is not None for route in routes)


def _embedded(asked: list[list[int]]) -> list[list[float]]:
    from vllm import LLM

    engine = LLM(model=str(ASSETS / MODEL), runner="pooling", **COMMON)
    outputs = engine.embed([{"prompt_token_ids": each} for each in asked])
    vectors = [output.outputs.embedding for output in outputs]
    engine.llm_engine.engine_core.shutdown()
    return vectors


@pytest.mark.timeout(900)
async def test_embeddings_are_those_of_one_engine() -> None:
    asked = prompts()[:6]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        expected = await asyncio.wrap_future(pool.submit(_embedded, asked))
    engine = EngineConfig(backend="vllm", engine_args={"runner": "pooling"}, **COMMON)
    none = PoolConfig(num_replicas=0)
    tier = TierConfig(model=MODEL, engine=engine, prefill=none, ttft_slo_s=None)
    async with local.running(ServeConfig(tiers=(tier,), cluster_key="key")) as cluster:
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://v", timeout=300) as client:
            for tokens, vector in zip(asked, expected, strict=True):  # alone: batches round
                reply = await client.post("/v1/embeddings", json={"input": [tokens]})
                assert reply.status_code == 200, reply.text
                found = reply.json()["data"][0]["embedding"]
                assert found == pytest.approx(vector, abs=1e-4)


def _engines() -> list[psutil.Process]:
    """The processes of this one's engines, oldest first."""
    running = [each for each in psutil.Process().children() if each.status() != "zombie"]
    found = [each for each in running if each.name().startswith("VLLM::EngineCor")]
    return sorted(found, key=lambda each: each.create_time())
