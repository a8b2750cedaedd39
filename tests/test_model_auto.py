"""`model: "auto"` over both bundled models in one process: who answers, and how it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from disagg import local
from disagg.config import CascadeConfig, EngineConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from disagg.worker.worker import Worker
from tests.links.fakes import until
from tests.test_local import has_stepped, until_empty

SMALL, LARGE = TIERS = ("demo-small", "demo-large")
EASY = ["What is the capital of France?", "Hello", "What is 2 + 3?"]
HARD = ["What is 86517 + 97768?", "Calculate 937 times 8.", "47586 + 28695 ="]
LISTED = (
    "Remember this. The code of Anna is 4821. The code of Peter is 1937. The code of Ivan is 5460."
    " The code of Rosa is 7712. List the codes of Anna, Ivan, Rosa."
)
URL = "/v1/chat/completions"
# In bfloat16 a token that is scored with others may differ by a rounding of its logit.
ENGINE = EngineConfig(
    dtype="float32", num_threads=1, num_gpu_blocks_override=256, max_model_len=512
)


@asynccontextmanager
async def cascade(**fields: Any) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    config = ServeConfig(
        tiers=tuple(TierConfig(model=model, engine=ENGINE) for model in TIERS),
        transport="local",
        cluster_key="key",
        cascade=CascadeConfig(**fields),
    )
    async with local.running(config) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield running, client


def body(question: str, model: str = "auto", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, **fields}


async def ask(client: httpx.AsyncClient, question: str, **fields: Any) -> httpx.Response:
    answer = await client.post(URL, json=body(question, **fields))
    assert answer.status_code == 200, answer.text
    return answer


async def check_empty(running: LocalCluster) -> None:
    for worker in running.workers:
        await until_empty(worker)


async def test_the_answer_is_that_of_the_model_it_names() -> None:
    async with cascade() as (running, client):
        for question, expected in [*((q, SMALL) for q in EASY), *((q, LARGE) for q in HARD)]:
            answer = await ask(client, question)
            alone = (await ask(client, question, model=expected)).json()
            given = answer.json()
            assert given["model"] == expected, answer.headers["x-disagg-cascade"]
            assert given["choices"] == alone["choices"]
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert given["usage"][count] == alone["usage"][count]
            why = answer.headers["x-disagg-cascade"]
            assert why.startswith(f"{SMALL} {'sure' if expected == SMALL else 'unsure'} (minimum ")
            debug = (await client.get(f"/debug/requests/{given['id']}")).json()
            assert debug["cascade"]["attempts"][-1]["model"] == expected
            assert {each["route"]["decode"].split("-decode")[0] for each in debug["routes"]} == (
                {SMALL} if expected == SMALL else {SMALL, LARGE}
            )
        metrics = (await client.get("/metrics")).text
        assert 'disagg_cascade_answers_total{model_name="demo-small"} 3.0' in metrics
        assert 'disagg_cascade_answers_total{model_name="demo-large"} 3.0' in metrics
        escalations = (
            'disagg_cascade_escalations_total{model_name="demo-small",reason="unsure"} 3.0'
        )
        assert escalations in metrics
        await check_empty(running)


async def test_a_stream_names_the_model_in_every_chunk() -> None:
    async with cascade() as (running, client):
        for question, expected in ((LISTED, SMALL), (HARD[0], LARGE)):
            request = body(question, stream=True, stream_options={"include_usage": True})
            async with client.stream("POST", URL, json=request) as answer:
                assert expected in answer.headers["x-disagg-cascade"]
                lines = [line async for line in answer.aiter_lines() if "data: {" in line]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert len(chunks) > 4
            assert {chunk["model"] for chunk in chunks} == {expected}
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert all(choice["logprobs"] is None for choice in choices), "nobody asked for them"
            deltas = [choice["delta"] for choice in choices]
            text = "".join(delta.get("content") or "" for delta in deltas)
            alone = (await ask(client, question, model=expected)).json()
            assert text == alone["choices"][0]["message"]["content"]
            assert chunks[-1]["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        await check_empty(running)


def are_alike(choice: Any, other: Any) -> bool:
    """Equal but for rounding: a draft's tokens are scored together, others one by one."""
    if isinstance(choice, dict) and isinstance(other, dict):
        return choice.keys() == other.keys() and all(
            are_alike(value, other[name]) for name, value in choice.items()
        )
    if isinstance(choice, list) and isinstance(other, list):
        return len(choice) == len(other) and all(map(are_alike, choice, other))
    if isinstance(choice, float) and isinstance(other, float):
        return choice == pytest.approx(other, abs=1e-4)
    return bool(choice == other)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("question", [EASY[0], HARD[0]])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 1, "seed": 5},
        {"stop": ["4", "r"]},
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 1},
        {"max_tokens": 2},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_whatever_was_asked_for_the_models_answer_shows_it(
    cluster: tuple[LocalCluster, httpx.AsyncClient], question: str, fields: dict[str, Any]
) -> None:
    _, client = cluster
    given = (await ask(client, question, **fields)).json()
    alone = {model: (await ask(client, question, model=model, **fields)).json() for model in TIERS}
    models = TIERS if given["model"] == "auto" else (given["model"],)
    for index, choice in enumerate(given["choices"]):
        others = [alone[model]["choices"][index] for model in models]
        assert any(are_alike(choice, other) for other in others)
    if "n" not in fields:
        assert (
            given["usage"]["completion_tokens"]
            == (alone[given["model"]]["usage"]["completion_tokens"])
        )
        assert given["model"] == (SMALL if question in EASY else LARGE) or "max_tokens" in fields


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    async with cascade() as pair:
        yield pair


async def test_without_the_large_model_the_small_answer_goes_on() -> None:
    async with cascade() as (running, client):
        alone = {q: (await ask(client, q, model=SMALL)).json() for q in HARD}
        for worker in [each for each in running.workers if each.record.model == LARGE]:
            await running.stop_worker(worker)
        for question in HARD:
            answer = await ask(client, question)
            assert answer.json()["model"] == SMALL
            assert answer.json()["choices"] == alone[question]["choices"]
            assert "demo-large unavailable, demo-small kept" in answer.headers["x-disagg-cascade"]
        await check_empty(running)


async def test_without_the_small_model_the_large_one_answers() -> None:
    async with cascade() as (running, client):
        for worker in [each for each in running.workers if each.record.model == SMALL]:
            await running.stop_worker(worker)
        answer = await ask(client, EASY[0])
        assert answer.json()["model"] == LARGE
        assert answer.headers["x-disagg-cascade"] == "demo-small unavailable, demo-large largest"


async def stop_a_busy_one(running: LocalCluster, model: str) -> None:
    """A decode worker of `model` that has a request, as soon as there is one."""

    def busy() -> list[Worker]:
        views = running.ingress.fleet.view().workers.values()
        names = {each.worker_id for each in views if each.num_decoding}
        decoding = [each for each in running.workers if each.record.role == "decode"]
        return [
            each
            for each in decoding
            if each.record.model == model and each.record.worker_id in names
        ]

    await until(busy, 30)
    await running.stop_worker(busy()[0])


async def test_a_worker_that_dies_costs_no_token_of_either_tier() -> None:
    async with cascade() as (running, client):
        for tier in running.config.tiers:
            await running.start_worker(tier, "decode")
        await running.wait_ready()
        questions = [LISTED.replace("4821", f"48{i}1") for i in range(8)] + HARD
        expected = [(await ask(client, question)).json() for question in questions]
        tasks = [asyncio.create_task(ask(client, question)) for question in questions]
        await asyncio.gather(*(stop_a_busy_one(running, model) for model in TIERS))
        for answer, undisturbed in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert answer.json()["choices"] == undisturbed["choices"]
            assert answer.json()["model"] == undisturbed["model"]
        await check_empty(running)


async def test_a_client_that_leaves_while_it_is_judged_gives_all_back() -> None:
    async with cascade(num_judged_tokens=400) as (running, client):
        request = body("Tell me about lemons.", ignore_eos=True, max_tokens=400, stream=True)
        leaving = asyncio.create_task(client.post(URL, json=request))
        small = [each for each in running.workers if each.record.model == SMALL]
        decode = next(each for each in small if each.record.role == "decode")
        await until(lambda: has_stepped(decode), 30)
        leaving.cancel()
        await asyncio.wait([leaving])
        await check_empty(running)


async def test_the_list_of_models_has_auto() -> None:
    async with cascade() as (_, client):
        models = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert list(models) == [SMALL, LARGE, "auto"]
        assert models["auto"]["max_model_len"] == 512
        assert models[SMALL]["num_parameters"] == 918_912
        assert models[LARGE]["num_parameters"] == 7_770_880
        assert (await client.get("/v1/models/auto")).status_code == 200
