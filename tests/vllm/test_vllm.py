"""A fleet of real vLLM engines (CPU): prefill and decode workers, KV over NIXL.

Answers are greedy, in float32, and compared with those of one plain vLLM engine: 200 prompts, with
prefix hits, streams that clients close, pulls that fail, a worker that drains and an engine that is
killed. With SmolLM2 they are fewer.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import pytest_asyncio

from disagg import local
from disagg.config import ASSETS, EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.host import free_port
from disagg.local import LocalCluster
from disagg.models.description import describe_model
from disagg.models.fetched import cached_file, fetch
from disagg.models.gguf_model import GgufFiles, GgufStored
from disagg.models.gguf_values import read_values
from disagg.models.quantized_values import Quantized
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


def prompts(num: int = NUM_PROMPTS) -> list[list[int]]:
    """Some share a prefix of several blocks; their lengths lie also beside multiples of a block."""
    rng = random.Random(0)
    shared = [rng.choices(range(3, 1000), k=6 * BLOCK_SIZE) for _ in range(4)]
    made = []
    for number in range(num):
        begin = shared[number % 4] if number % 2 else []
        length = rng.choice([5, 31, 32, 33, 63, 64, 65, 96, 127, 128, 200])
        made.append([*begin, *rng.choices(range(3, 1000), k=length)])
    return made


async def plain(compute: Callable[..., Any], *given: Any) -> Any:
    """In a process of its own, as an engine does not give everything back."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return await asyncio.wrap_future(pool.submit(compute, *given))


def _answers(model: str, asked: list[list[int]]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, **COMMON)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": each} for each in asked], greedy)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    engine.llm_engine.engine_core.shutdown()  # or this process waits for that of the engine
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected() -> list[list[int]]:
    found: list[list[int]] = await plain(_answers, str(ASSETS / MODEL), prompts())
    return found


@asynccontextmanager
async def fleet(
    model: str = MODEL, num_prefill: int = 0, num_decode: int = 1, **engine_args: Any
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    tier = TierConfig(
        model=model,
        engine=EngineConfig(backend="vllm", engine_args=engine_args, **COMMON),
        prefill=PoolConfig(num_replicas=num_prefill),
        decode=PoolConfig(num_replicas=num_decode),
        ttft_slo_s=None,
    )
    async with local.running(ServeConfig(tiers=(tier,), cluster_key="key")) as cluster:
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://v", timeout=300) as client:
            yield cluster, client


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
    body = {
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
    async with fleet(num_prefill=2, num_decode=2) as (cluster, client):
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


def write_unpacked(directory: Path) -> str:
    """SmolLM2 as transformers has it, as vLLM reads no GGUF."""
    import torch
    from safetensors.torch import save_file

    assert fetch("smollm2", lambda event, message, **fields: None, lambda: False)
    file = cached_file("smollm2")
    files = GgufFiles(file)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(files.read(name) or "")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    tensors = {}
    for name, stored in describe_model(file).tensors.items():
        values = read_values(cast("GgufStored", stored), ())
        if isinstance(values, Quantized):
            values = values.widened(torch.float32)
        tensors[name] = values.float()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


@pytest.mark.timeout(1200)
async def test_answers_of_smollm2_are_those_of_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that have a cached prefix are computed where it is, the others by prefill workers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    model = await plain(write_unpacked, tmp_path / "model")
    asked = prompts(20)
    expected = await plain(_answers, model, asked)
    async with fleet(model, num_prefill=1) as (cluster, client):
        answers = [await ask(client, prompt) for prompt in asked]
        assert [each["choices"][0]["token_ids"] for each in answers] == expected
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
    asked = prompts(6)
    expected = await plain(_embedded, asked)
    async with fleet(runner="pooling") as (_, client):
        for tokens, vector in zip(asked, expected, strict=True):  # alone: batches round
            reply = await client.post("/v1/embeddings", json={"input": [tokens]})
            assert reply.status_code == 200, reply.text
            assert reply.json()["data"][0]["embedding"] == pytest.approx(vector, abs=1e-4)


# Of a model that answers, as vLLM makes a reranker of Qwen3-Reranker's first files.
RERANKER: dict[str, Any] = {
    "runner": "pooling",
    "convert": "classify",
    "hf_overrides": {"classifier_from_token": ["a", "e"], "method": "from_2_way_softmax"},
}
QUERY, DOCUMENTS = "What is the capital?", ["Paris is the capital.", "2 + 3 = 5", "Hello"]


def _scored(pairs: list[str]) -> list[float]:
    from vllm import LLM

    engine = LLM(model=str(ASSETS / MODEL), **RERANKER, **COMMON)
    outputs = engine.classify(pairs)
    scores = [output.outputs.probs[0] for output in outputs]
    engine.llm_engine.engine_core.shutdown()
    return scores


@pytest.mark.timeout(900)
async def test_scores_are_those_of_one_engine() -> None:
    expected = await plain(_scored, [QUERY + each for each in DOCUMENTS])
    assert max(expected) - min(expected) > 1e-3
    async with fleet(**RERANKER) as (_, client):
        body = {"query": QUERY, "documents": DOCUMENTS}
        reply = await client.post("/v1/rerank", json=body)
        assert reply.status_code == 200, reply.text
        found = {each["index"]: each["relevance_score"] for each in reply.json()["results"]}
        assert [found[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)
        assert [*found] == sorted(found, key=lambda index: -expected[index])


@pytest.mark.timeout(900)
async def test_drafts_of_vllm_change_no_answer(expected: list[list[int]]) -> None:
    """Speculation is vLLM's own, by its argument."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    async with fleet(speculative_config=drafts) as (_, client):
        answers = [await ask(client, prompt) for prompt in prompts(8)]
        assert [each["choices"][0]["token_ids"] for each in answers] == expected[:8]


def _engines() -> list[psutil.Process]:
    """The processes of this one's engines, oldest first."""
    running = [each for each in psutil.Process().children() if each.status() != "zombie"]
    found = [each for each in running if each.name().startswith("VLLM::EngineCor")]
    return sorted(found, key=lambda each: each.create_time())
