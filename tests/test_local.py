"""The whole system in one process, with a real (tiny) model: its text is one engine's text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from disagg import local
from disagg.config import EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from disagg.time_model import TransferTimeModel
from disagg.worker.core import WorkerCore
from disagg.worker.parts import Parts
from disagg.worker.worker import Worker
from tests.e2e.single_engine import SingleEngine
from tests.links.fakes import until
from tests.tiny_model import tiny_parts

Kind = Literal["nixl", "local"]
ENGINE = EngineConfig(
    dtype="float32", num_threads=1, num_gpu_blocks_override=96, max_model_len=512, max_num_seqs=8
)
LOOK_S = 0.005  # pause between two checks of a worker; without it both threads would be busy
LONG = "a prompt with so many blocks that it is prefilled elsewhere: " * 4


@pytest.fixture(scope="module")
def reference(model: Path) -> SingleEngine:
    return SingleEngine(model, ENGINE)


@asynccontextmanager
async def cluster(
    model: Path,
    transport: Kind = "local",
    num_prefill: int = 1,
    num_decode: int = 1,
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    tier = TierConfig(
        model=str(model),
        engine=ENGINE,
        prefill=PoolConfig(num_replicas=num_prefill),
        decode=PoolConfig(num_replicas=num_decode),
        ttft_slo_s=None,  # or a busy machine refuses
    )
    config = ServeConfig(tiers=(tier,), transport=transport, cluster_key="key")
    async with local.running(config, tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield running, client


def body(content: str, max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "model": "tiny",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        **fields,
    }


async def chat(client: httpx.AsyncClient, *args: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body(*args, **fields))
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


def text(answer: dict[str, Any], index: int = 0) -> str:
    content: str = answer["choices"][index]["message"]["content"]
    return content


def has_stepped(worker: Worker) -> bool:
    costs = worker._core.status().step_costs
    return costs is not None and costs.num_observed > 0


async def until_empty(worker: Worker) -> None:
    """All blocks are back and nobody holds a ticket."""

    def is_empty() -> bool:
        status = worker._core.status()
        return worker._core.is_idle and status.num_free_blocks == status.num_blocks

    async with asyncio.timeout(120):
        while not await worker._ask(is_empty):
            await worker.check()
            await asyncio.sleep(LOOK_S)
    await worker.check()


@pytest.mark.parametrize("transport", ["local", "nixl"])
async def test_text_is_one_engines_text(
    model: Path, reference: SingleEngine, transport: Kind
) -> None:
    async with cluster(model, transport, 2, 2) as (running, client):
        wanted = [
            (content, temperature, seed)
            for content in ("short", LONG, "another one: " + LONG)
            for temperature, seed in ((0.0, 0), (1.0, 7), (1.0, 8))
        ]
        answers = await asyncio.gather(
            *(chat(client, content, temperature=t, seed=s) for content, t, s in wanted)
        )
        for answer, (content, temperature, seed) in zip(answers, wanted, strict=True):
            alone = reference.chat(content, 24, temperature=temperature, seed=seed)
            assert text(answer) == alone
        cores = [worker._core for worker in running.workers if worker.record.role == "decode"]
        assert sum(len(core.status().transfers) for core in cores), "nothing was pulled"
        told = [(await client.get(f"/debug/requests/{each['id']}")).json() for each in answers]
        visits = [visit for each in told for route in each["routes"] for visit in route["visits"]]
        lanes = {visit["pull_lane"] for visit in visits if visit["pull_nbytes"]}
        assert lanes == {"cma" if transport == "nixl" else ""}
        for worker in running.workers:
            await until_empty(worker)


async def test_prompts_are_scored_wherever_they_are_computed(model: Path) -> None:
    """Also where they are cached; and an answer that is scored is the same answer."""
    async with cluster(model, num_prefill=2, num_decode=2) as (running, client):
        contents = [LONG, "another one: " + LONG, "short"] * 3
        plain = await asyncio.gather(*(chat(client, each) for each in contents))
        asked = (chat(client, each, prompt_logprobs=1) for each in contents)
        for answer, wanted in zip(await asyncio.gather(*asked), plain, strict=True):
            assert text(answer) == text(wanted)
            first, *scores = answer["prompt_logprobs"]
            usage = answer["usage"]
            assert first is None and len(scores) == usage["prompt_tokens"] - 1
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        cores = [worker._core for worker in running.workers if worker.record.role == "decode"]
        assert sum(len(core.status().transfers) for core in cores), "nothing was pulled"
        prompt = {"prompt": LONG, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        echoed = (await client.post("/v1/completions", json=prompt)).json()["choices"][0]
        values = echoed["logprobs"]["token_logprobs"][1:]
        tops = [max(each.values()) for each in echoed["logprobs"]["top_logprobs"][1:]]
        assert all(value <= top + 1e-6 for value, top in zip(values, tops, strict=True))
        for worker in running.workers:
            await until_empty(worker)


async def test_usage_counts_what_the_cache_had(model: Path) -> None:
    async with cluster(model) as (_, client):
        first = await chat(client, LONG)
        again = await chat(client, LONG)
        assert text(again) == text(first)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        num_prompt = again["usage"]["prompt_tokens"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_prompt - 16 <= cached < num_prompt


async def test_several_answers_logprobs_and_stop_strings(
    model: Path, reference: SingleEngine
) -> None:
    async with cluster(model) as (_, client):
        answer = await chat(client, LONG, 12, n=2, logprobs=True, top_logprobs=3)
        alone = reference.chat(LONG, 12)
        for choice in answer["choices"]:
            assert choice["message"]["content"] == alone
            scored = choice["logprobs"]["content"]
            assert len(scored) == 12
            for token in scored:  # greedy: the chosen one is the likeliest
                assert token["logprob"] == token["top_logprobs"][0]["logprob"]
                assert len(token["top_logprobs"]) == 3
        sampled = reference.chat(LONG, 40, temperature=1, seed=3)
        stop = sampled[20:22]
        cut = await chat(client, LONG, 40, temperature=1, seed=3, stop=[stop])
        assert text(cut) == sampled[: sampled.index(stop)]
        assert cut["choices"][0]["finish_reason"] == "stop"


async def test_a_client_that_leaves_gives_all_blocks_back(model: Path) -> None:
    async with cluster(model) as (running, client):
        request = body(LONG, 200, stream=True, ignore_eos=True)
        leaving = asyncio.create_task(client.post("/v1/chat/completions", json=request))
        decode = next(worker for worker in running.workers if worker.record.role == "decode")
        await until(lambda: has_stepped(decode), 30)
        leaving.cancel()
        await asyncio.wait([leaving])
        for worker in running.workers:
            await until_empty(worker)


@pytest.mark.parametrize("drain_s", [None, 30.0], ids=["killed", "drained"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_stops_loses_no_request_and_no_token(
    model: Path, reference: SingleEngine, role: str, drain_s: float | None
) -> None:
    contents = [f"{i}: {LONG}" for i in range(6)]
    async with cluster(model, "local", 2, 2) as (running, client):
        tasks = [
            asyncio.create_task(chat(client, content, 60, temperature=1, seed=i, ignore_eos=True))
            for i, content in enumerate(contents)
        ]
        candidates = [worker for worker in running.workers if worker.record.role == role]
        await until(lambda: any(map(has_stepped, candidates)), 30)
        victim = next(filter(has_stepped, candidates))
        await running.stop_worker(victim, drain_s)
        answers = await asyncio.gather(*tasks)
        for i, (content, answer) in enumerate(zip(contents, answers, strict=True)):
            assert answer["usage"]["completion_tokens"] == 60
            assert text(answer) == reference.chat(
                content, 60, temperature=1, seed=i, ignore_eos=True
            )
        for worker in running.workers:
            await until_empty(worker)


def scores(choice: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in (choice["logprobs"] or {}).get("content", ())]


ALL_SORTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1, "seed": 3},
    {"temperature": 1, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 3, "temperature": 1, "seed": 8},
    {"temperature": 1.3, "seed": 11, "stop": ["e", "the"], "top_p": 0.9},
]


@pytest.mark.parametrize("transport", ["local", "nixl"])
async def test_a_planned_stop_moves_kv_and_no_answer_shows_it(
    model: Path, transport: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was asked for; and nothing is counted or computed twice."""
    empty = WorkerCore._empty
    monkeypatch.setattr(WorkerCore, "_empty", lambda core, left_s: empty(core, -1.0))
    sources: set[str] = set()  # of pulls; workers forget the figures of who has left
    observe = TransferTimeModel.observe

    def noted(times: TransferTimeModel, source_id: str, *figures: Any) -> None:
        sources.add(source_id)
        observe(times, source_id, *figures)

    monkeypatch.setattr(TransferTimeModel, "observe", noted)
    async with cluster(model, transport, 1, 2) as (running, client):

        async def ask(index: int) -> dict[str, Any]:
            fields = {"ignore_eos": "stop" not in ALL_SORTS[index], **ALL_SORTS[index]}
            return await chat(client, f"{index}: {LONG[:90]}", 60, **fields)

        asked = range(len(ALL_SORTS))
        expected = [await ask(index) for index in asked]
        tasks = [asyncio.create_task(ask(index)) for index in asked]
        decoding = [worker for worker in running.workers if worker.record.role == "decode"]
        # Either may have all of them: a prompt goes where it is cached since it was first asked.
        await until(lambda: any(worker._engine.scheduler.running for worker in decoding), 30)
        victim = max(decoding, key=lambda worker: len(worker._engine.scheduler.running))
        await running.stop_worker(victim, 60.0)
        answers = await asyncio.gather(*tasks)
        for answer, undisturbed in zip(answers, expected, strict=True):
            for choice, same in zip(answer["choices"], undisturbed["choices"], strict=True):
                assert choice["message"] == same["message"]
                assert choice["finish_reason"] == same["finish_reason"]
                assert scores(choice) == pytest.approx(scores(same), abs=1e-4)
            for count in ("prompt_tokens", "completion_tokens"):
                assert answer["usage"][count] == undisturbed["usage"][count]
        assert victim.record.worker_id in sources, "its KV was not fetched"
        for worker in running.workers:
            await until_empty(worker)


async def test_a_stream_says_what_the_whole_answer_says(model: Path) -> None:
    async with cluster(model) as (_, client):
        whole = await chat(client, LONG)
        request = body(LONG, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [choice["delta"] for piece in pieces for choice in piece["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text(whole)


async def test_engines_of_one_process_share_its_gpu(model: Path) -> None:
    claims: list[float] = []
    build_parts = tiny_parts()

    def build(config: ServeConfig, tier: TierConfig, *rest: Any, **options: Any) -> Parts:
        claims.append(tier.engine.gpu_memory_utilization)
        return build_parts(config, tier, *rest, **options)

    tiers = (
        TierConfig(model=str(model), engine=ENGINE, prefill=PoolConfig(num_replicas=0)),
        TierConfig(
            model=str(model), served_model_name="b", engine=ENGINE, decode=PoolConfig(num_gpus=0.5)
        ),
    )
    config = ServeConfig(tiers=tiers, transport="local", cluster_key="key")
    async with local.running(config, build):
        assert sorted(claims) == pytest.approx([0.9 / 3, 0.9 / 3, 0.45])
