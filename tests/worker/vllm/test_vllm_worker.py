"""A fleet whose workers run vLLM, with a stand-in for its engine (`fake_vllm.py`): its answers are
those of one engine, through hand-overs, hits, deaths, drains and leases that have ended."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from disagg import local
from disagg.blocks import hash_root
from disagg.config import CascadeConfig, EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.errors import EngineFailed
from disagg.local import LocalCluster
from disagg.messages import GenerateRequest, Pooling, SamplingParams, Start, TokenDelta
from disagg.worker.check import check_tier
from disagg.worker.vllm import tickets, worker
from disagg.worker.vllm.engine import EnginePrompt, EngineStep
from disagg.worker.vllm.requests import sampling_arguments
from disagg.worker.vllm.worker import VllmWorker
from tests.links.fakes import until
from tests.tiny_model import write_tiny_adapter
from tests.worker.vllm.fake_vllm import (
    BLOCK_SIZE,
    IMAGE_MARK,
    FakeVllm,
    answer,
    embedding,
    expanded,
    score,
)

NUM_NEW = 12


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "VllmEngine", FakeVllm)


class Fleet:
    def __init__(self, cluster: LocalCluster, client: httpx.AsyncClient) -> None:
        self.cluster, self.client = cluster, client

    def engine(self, number: int) -> FakeVllm:
        worker: object = self.cluster.workers[number]
        assert isinstance(worker, VllmWorker)
        engine = worker._engine
        assert isinstance(engine, FakeVllm)
        return engine

    async def ask(self, prompt: list[int], status: int = 200, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
        reply = await self.client.post("/v1/completions", json={**body, **IDS, **fields})
        assert reply.status_code == status, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def tokens(self, prompt: list[int], **fields: Any) -> list[int]:
        ids: list[int] = (await self.ask(prompt, **fields))["choices"][0]["token_ids"]
        return ids


IDS = {"return_token_ids": True}


@asynccontextmanager
async def fleet(
    model: Path,
    num_prefill: int = 1,
    num_decode: int = 1,
    adapters: dict[str, str] | None = None,
    max_requests_nbytes: int = 1 << 20,
    **engine_args: Any,
) -> AsyncIterator[Fleet]:
    tier = TierConfig(
        model=str(model),
        lora_modules=adapters or {},
        engine=EngineConfig(
            backend="vllm",
            block_size=BLOCK_SIZE,
            enable_lora=adapters is not None,
            max_requests_nbytes=max_requests_nbytes,
            engine_args=engine_args,
        ),
        prefill=PoolConfig(num_replicas=num_prefill),
        decode=PoolConfig(num_replicas=num_decode),
        ttft_slo_s=None,
    )
    config = ServeConfig(tiers=(tier,), cluster_key="key")
    async with local.running(config) as cluster:
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield Fleet(cluster, client)


def prompt_of(num_tokens: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + each * 7) % 200 for each in range(num_tokens)]


def expected(prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    return answer(tuple(prompt), num_new)


async def test_answers_are_one_engines_at_every_length_beside_a_block(model: Path) -> None:
    """The first token of an answer may begin a block, which the prefill must have computed."""
    async with fleet(model) as it:
        for seed, num_tokens in enumerate(range(5 * BLOCK_SIZE - 2, 6 * BLOCK_SIZE + 3)):
            prompt = prompt_of(num_tokens, seed)
            assert await it.tokens(prompt) == expected(prompt), num_tokens
        assert it.engine(1).num_imported > 0


async def test_a_ticket_whose_lease_may_have_ended_is_not_used(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LEASE_S", tickets.MARGIN_S)  # too short for any hand-over
    async with fleet(model) as it:
        prefill, decode = it.engine(0), it.engine(1)
        for seed in range(6):
            prompt = prompt_of(100, seed)
            task = asyncio.create_task(it.tokens(prompt))
            while not task.done():
                prefill.end_leases()
                await asyncio.sleep(0)
            assert task.result() == expected(prompt)
        assert prefill.kept and not decode.num_imported


async def test_the_router_finds_prefixes_from_kv_events(model: Path) -> None:
    async with fleet(model, num_prefill=0, num_decode=2) as it:
        prompt = prompt_of(8 * BLOCK_SIZE + 3)
        await it.tokens(prompt)
        holder = 0 if it.engine(0).seen else 1
        for _ in range(4):
            usage = (await it.ask([*prompt, 5]))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 8 * BLOCK_SIZE
        assert len(it.engine(holder).seen) == 5 and not it.engine(1 - holder).seen
        it.engine(holder).clear_cache()
        index = it.cluster.ingress.fleet.index
        await until(lambda: not index.num_blocks)


async def held(
    it: Fleet, num_new: int, prompt: list[int], **fields: Any
) -> tuple[asyncio.Task[list[int]], int]:
    """A request whose engine waits after so many tokens, and the number of its worker."""
    for each in (0, 1):
        it.engine(each).stops_at = num_new
        it.engine(each).may_go_on.clear()
    task = asyncio.create_task(it.tokens(prompt, **fields))
    await until(lambda: it.engine(0).num_waits or it.engine(1).num_waits)
    return task, 0 if it.engine(0).num_waits else 1


async def test_a_request_goes_on_where_an_engine_died(model: Path) -> None:
    async with fleet(model, num_prefill=0, num_decode=2) as it:
        prompt = prompt_of(60)
        task, dying = await held(it, 5, prompt)
        it.engine(dying).is_dead = True
        with pytest.raises(EngineFailed):
            it.cluster.workers[dying].check_health()
        for each in (0, 1):
            it.engine(each).may_go_on.set()
        assert await task == expected(prompt)
        (moved,) = it.engine(1 - dying).seen
        assert len(moved.token_ids) == 65 and moved.sampling["max_tokens"] == NUM_NEW - 5


async def test_a_request_goes_on_where_no_engine_hangs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Serve replaces the worker, unless its engine finishes a step after all."""
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    monkeypatch.setattr(worker, "TURN_S", 2.0)  # counted as looks of `liveness.LOOK_S`
    async with fleet(model, num_prefill=0, num_decode=2) as it:
        prompt = prompt_of(60)
        task, hanging = await held(it, 5, prompt)
        it.engine(1 - hanging).may_go_on.set()
        assert await task == expected(prompt)
        assert it.engine(hanging).num_aborted == 1
        worker_of = it.cluster.workers[hanging]
        for _ in range(3):
            assert await it.tokens(prompt) == expected(prompt)
        assert len(it.engine(hanging).seen) == 1
        with pytest.raises(EngineFailed, match="has not finished a step"):
            while True:
                worker_of.check_health()
                await asyncio.sleep(0.01)
        it.engine(1 - hanging).may_go_on.clear()
        it.engine(hanging).may_go_on.set()
        it.engine(hanging).listener.on_step(EngineStep())
        await until(lambda: not worker_of._liveness.is_stalled)
        worker_of.check_health()


async def test_a_draining_worker_gives_its_requests_away(model: Path) -> None:
    async with fleet(model, num_prefill=0, num_decode=2) as it:
        prompt = prompt_of(60)
        task, leaving = await held(it, 3, prompt, max_tokens=400)
        engine, staying = it.engine(leaving), it.engine(1 - leaving)
        staying.may_go_on.set()
        await it.cluster.stop_worker(it.cluster.workers[leaving], drain_s=0.2)
        assert await task == expected(prompt, 400)
        assert engine.num_aborted == 1


async def test_closing_a_stream_aborts_its_request(model: Path) -> None:
    async with fleet(model, num_prefill=0) as it:
        engine = it.engine(0)
        engine.stops_at = 2
        engine.may_go_on.clear()
        task = asyncio.create_task(it.tokens(prompt_of(40)))
        await until(lambda: bool(engine.seen))
        task.cancel()
        await until(lambda: engine.num_aborted == 1)
        (worker,) = cast("list[VllmWorker]", it.cluster.workers)
        status = worker._status()
        assert (status.num_running, status.num_waiting, status.num_uncomputed_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_what_another_engine_could_not_go_on_with_is_not_handed_over(
    model: Path, fields: dict[str, Any]
) -> None:
    async with fleet(model) as it:
        for seed in range(4):
            prompt = prompt_of(100, seed)
            assert await it.tokens(prompt, **fields) == expected(prompt)
        seen = _seen(it)
        assert len(seen) == 4 and not any("extra_args" in each.sampling for each in seen)


async def test_drafts_are_ignored_and_no_cached_prefix_is_given_away(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(model, num_prefill=0) as it:
        prompt = prompt_of(60)
        await it.tokens(prompt)
        (only,), engine = cast("list[VllmWorker]", it.cluster.workers), it.engine(0)
        given: list[TokenDelta] = []
        monkeypatch.setattr(only._server, "answer", lambda _, delta: given.append(delta))
        request = GenerateRequest(
            request_id="r",
            model="tiny",
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            hash_root=hash_root("model", BLOCK_SIZE, ""),
            block_hashes=(),
            sampling=SamplingParams(max_tokens=4),
            deadline_unix_s=2e9,
            draft_token_ids=(1, 2, 3),
        )
        only._receive(0, Start(1, replace(request, token_ids=()), hand_over=True))
        (refusal,) = given
        assert refusal.is_last and refusal.error is not None and refusal.ticket is None
        only._receive(0, Start(2, request))
        await until(lambda: len(engine.seen) == 2)
        assert engine.seen[1].token_ids == request.token_ids
        assert engine.seen[1].sampling == sampling_arguments(
            replace(request, draft_token_ids=()), 4, {}
        )


async def test_an_answer_that_ends_with_its_first_token(model: Path) -> None:
    async with fleet(model) as it:
        prompt = prompt_of(6 * BLOCK_SIZE)
        (first,) = expected(prompt, 1)
        for _ in range(3):
            found = await it.ask(prompt, stop_token_ids=[first])
            assert found["choices"][0]["finish_reason"] == "stop"
            assert found["usage"]["completion_tokens"] == 1


async def test_what_vllm_cannot_do_is_said(model: Path) -> None:
    async with fleet(model, num_prefill=0) as it:
        found = await it.ask(prompt_of(20), status=400, bad_words=["ab"])
        assert found["error"]["code"] == "unsupported_by_engine"
        assert "single tokens" in found["error"]["message"]
        assert await it.tokens(prompt_of(20)) == expected(prompt_of(20))


async def test_a_family_that_only_vllm_knows(model: Path, tmp_path: Path) -> None:
    """The ingress needs its tokenizer and limits, and no worker of ours reads its weights."""
    unknown = tmp_path / "tiny"
    shutil.copytree(model, unknown)
    config = json.loads((unknown / "config.json").read_text())
    config |= {"model_type": "qwen9_next", "architectures": ["Qwen9NextForConditionalGeneration"]}
    text = {"vocab_size": config.pop("vocab_size")}
    (unknown / "config.json").write_text(json.dumps({**config, "text_config": text}))
    check_tier(TierConfig(model=str(unknown), engine=EngineConfig(backend="vllm")), is_here=False)
    async with fleet(unknown) as it:
        assert await it.tokens(prompt_of(20)) == expected(prompt_of(20))


async def test_adapters_reach_vllm_and_keep_their_kv_apart(model: Path, tmp_path: Path) -> None:
    paths = {name: str(tmp_path / name) for name in ("red", "green")}
    for seed, path in enumerate(paths.values()):
        write_tiny_adapter(Path(path), tmp_path / f"merged-{seed}", model, seed=seed)
    served = {"red": paths["red"]}
    async with fleet(model, adapters=served) as it:
        loaded = {"lora_name": "green", "lora_path": paths["green"]}
        reply = await it.client.post("/v1/load_lora_adapter", json=loaded)
        assert reply.status_code == 200, reply.text
        prompt = prompt_of(6 * BLOCK_SIZE + 5)
        answers = [await it.tokens(prompt, model=name) for name in ("tiny", "red", "green") * 2]
        used = {each.adapter.name: each.adapter for each in _seen(it) if each.adapter is not None}
        digests = ["", used["red"].digest, used["green"].digest]
        assert answers == 2 * [answer(tuple(prompt), NUM_NEW, each) for each in digests]
        assert {name: each.path for name, each in used.items()} == paths


async def test_embeddings_are_those_of_vllm(model: Path) -> None:
    async with fleet(model, runner="pooling") as it:
        texts = [prompt_of(20), prompt_of(30, 2)]
        reply = await it.client.post("/v1/embeddings", json={"model": "tiny", "input": texts})
        assert reply.status_code == 200, reply.text
        found = [each["embedding"] for each in reply.json()["data"]]
        assert found == [array("f", embedding(tuple(text))).tolist() for text in texts]
        assert {len(each.token_ids) for each in _seen(it)} == {20, 30}


@pytest.mark.parametrize(("threshold", "answers"), [(-2.0, "small"), (-0.5, "large")])
async def test_a_cascade_begins_on_vllm_and_goes_on_with_our_engine(
    model: Path, threshold: float, answers: str
) -> None:
    """The tokens of the small model have a log-probability of -1."""
    engines = {
        "small": EngineConfig(backend="vllm", block_size=BLOCK_SIZE, max_model_len=256),
        "large": EngineConfig(num_threads=1, num_gpu_blocks_override=64, max_model_len=256),
    }
    none = PoolConfig(num_replicas=0)
    tiers = tuple(
        TierConfig(model=str(model), served_model_name=name, engine=engine, prefill=none)
        for name, engine in engines.items()
    )
    judged = CascadeConfig(thresholds=(threshold,), num_judged_tokens=4)
    config = ServeConfig(tiers=tiers, cluster_key="key", transport="local", cascade=judged)
    async with local.running(config) as cluster:
        app = httpx.ASGITransport(cluster.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            body = {"prompt": prompt_of(60), "max_tokens": NUM_NEW, "temperature": 0, **IDS}
            auto, alone = [
                (await client.post("/v1/completions", json={**body, "model": name})).json()
                for name in ("auto", answers)
            ]
            assert (auto["model"], auto["choices"]) == (answers, alone["choices"])


async def test_scores_are_those_of_vllms_head(model: Path) -> None:
    async with fleet(model, num_prefill=0, runner="pooling", convert="classify") as it:
        for more, head in (({}, "score"), ({"use_activation": False}, "logit")):
            body = {"model": "tiny", "text_1": "what?", "text_2": ["this", "that"], **more}
            reply = await it.client.post("/v1/score", json=body)
            assert reply.status_code == 200, reply.text
            asked = it.engine(0).seen[-2:]
            assert [each.pooling for each in asked] == [Pooling(head=head)] * 2  # type: ignore[arg-type]
            scores = sorted(array("f", score(each.token_ids))[0] for each in asked)
            assert sorted(each["score"] for each in reply.json()["data"]) == scores
        reply = await it.client.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
        assert "cannot compute embeddings" in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def seeing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that shows images."""
    directory = tmp_path_factory.mktemp("seeing") / "tiny"
    shutil.copytree(model, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    shows_parts = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
        "{{ '<|endoftext|>' if p.type == 'image' else p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    settings["chat_template"] = shows_parts
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def shown(image: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def see(it: Fleet, content: list[dict[str, Any]], status: int = 200) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_NEW}
    reply = await it.client.post("/v1/chat/completions", json={**body, "temperature": 0, **IDS})
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_images_reach_vllm_in_order_and_are_not_handed_over(seeing: Path) -> None:
    async with fleet(seeing) as it:
        images = (b"a cat", b"a cat", b"a dog")
        text = {"type": "text", "text": "compare " * 12}
        content = [text, *map(shown, images[:2]), text, shown(images[2])]
        found = await see(it, content)
        (prompt,) = _seen(it)
        assert prompt.images == images and prompt.token_ids.count(IMAGE_MARK) == 3
        assert "extra_args" not in prompt.sampling
        whole = expanded(prompt.token_ids, images)
        assert found["choices"][0]["token_ids"] == answer(whole, NUM_NEW)
        assert found["usage"]["prompt_tokens"] == len(whole)


async def test_the_router_finds_prompts_that_begin_with_the_same_image(seeing: Path) -> None:
    async with fleet(seeing, num_prefill=0, num_decode=2) as it:
        text = {"type": "text", "text": "what is it?"}
        await see(it, [shown(b"a cat"), text])
        holder = 0 if it.engine(0).seen else 1
        for _ in range(4):
            usage = (await see(it, [shown(b"a cat"), text, text]))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 3 * BLOCK_SIZE
        assert len(it.engine(holder).seen) == 5 and not it.engine(1 - holder).seen


async def test_images_count_for_the_requests_that_a_worker_takes(seeing: Path) -> None:
    async with fleet(seeing, num_prefill=0, max_requests_nbytes=5000) as it:
        engine = it.engine(0)
        engine.stops_at = 5
        engine.may_go_on.clear()
        first = asyncio.create_task(see(it, [shown(bytes(3000))]))
        await until(lambda: engine.num_waits)
        refused = await see(it, [shown(bytes(3000))], status=429)
        assert "at their limit" in refused["error"]["message"]
        assert len(engine.seen) == 1
        engine.may_go_on.set()
        await first
        await see(it, [shown(bytes(6000))])  # a single one is always taken


async def test_a_request_with_an_image_goes_on_where_an_engine_died(seeing: Path) -> None:
    async with fleet(seeing, num_prefill=0, num_decode=2) as it:
        for each in (0, 1):
            it.engine(each).stops_at = 5
            it.engine(each).may_go_on.clear()
        task = asyncio.create_task(see(it, [shown(b"a cat")]))
        await until(lambda: it.engine(0).num_waits or it.engine(1).num_waits)
        it.engine(0 if it.engine(0).num_waits else 1).is_dead = True
        for each in (0, 1):
            it.engine(each).may_go_on.set()
        found = await task
        first, moved = sorted(_seen(it), key=lambda each: len(each.token_ids))
        whole = expanded(first.token_ids, (b"a cat",))
        assert moved.images == (b"a cat",) and len(moved.token_ids) == len(first.token_ids) + 5
        assert found["choices"][0]["token_ids"] == answer(whole, NUM_NEW)
        assert found["usage"]["prompt_tokens"] == len(whole)


def _seen(it: Fleet) -> list[EnginePrompt]:
    return [*it.engine(0).seen, *it.engine(1).seen]
