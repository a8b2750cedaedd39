"""LoRA adapters in a whole fleet: each answer is that of the merged model, whatever runs beside.

Workers are real, in one process. The oracle is one engine with the adapter's product added to the
weights. KV of one adapter that was used for another would change the text.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from msgspec.structs import replace

from disagg import local
from disagg.config import EngineConfig, PoolConfig, ServeConfig, TierConfig
from disagg.local import LocalCluster
from disagg.worker.worker import Worker
from tests.e2e.single_engine import SingleEngine
from tests.links.fakes import until
from tests.tiny_model import tiny_parts, write_tiny_adapters

ENGINE = EngineConfig(
    dtype="float32", num_threads=1, num_gpu_blocks_override=96, max_model_len=512, max_num_seqs=8
)
LORA = replace(ENGINE, enable_lora=True, max_loras=2)
NAMES = ("red", "green", "blue")
LONG = "a prompt with so many blocks that it is prefilled elsewhere: " * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapters(tmp_path_factory.mktemp("adapters"), NAMES)


@pytest.fixture(scope="module")
def wanted(place: Path) -> dict[str, SingleEngine]:
    """What each model name answers."""
    merged = {name: SingleEngine(place / f"merged-{name}", ENGINE) for name in NAMES}
    return {"tiny": SingleEngine(place / "tiny", ENGINE), **merged}


@asynccontextmanager
async def fleet(
    place: Path,
    names: tuple[str, ...] = (),
    num_prefill: int = 1,
    num_decode: int = 1,
    engine: EngineConfig = LORA,
    transport: Literal["nixl", "local"] = "local",
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    tier = TierConfig(
        model=str(place / "tiny"),
        engine=engine,
        prefill=PoolConfig(num_replicas=num_prefill),
        decode=PoolConfig(num_replicas=num_decode),
        lora_modules={name: str(place / name) for name in names},
        ttft_slo_s=None,
    )
    config = ServeConfig(tiers=(tier,), transport=transport, cluster_key="key")
    async with local.running(config, tiny_parts()) as running:
        app = httpx.ASGITransport(running.ingress.app)
        async with httpx.AsyncClient(transport=app, base_url="http://local", timeout=60) as client:
            yield running, client
            for worker in workers_of(running):
                await worker.check()


def workers_of(running: LocalCluster) -> list[Worker]:
    return [worker for worker in running.workers if isinstance(worker, Worker)]


async def ask(client: httpx.AsyncClient, model: str, content: str, max_tokens: int = 12) -> str:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(f"/v1/{path}_lora_adapter", json=body)


@pytest.mark.parametrize("transport", ["local", "nixl"])
async def test_mixed_steps_answer_as_the_merged_models(
    place: Path, wanted: dict[str, SingleEngine], transport: Literal["nixl", "local"]
) -> None:
    """Three adapters for two slots, and the model itself: prompts here and elsewhere, twice."""
    async with fleet(place, NAMES, transport=transport) as (running, client):
        asked = [
            (model, content)
            for content in ("short", LONG, LONG + "and more")
            for model in ("tiny", *NAMES)
        ]
        for _ in range(2):  # the second time prefixes are cached
            answers = await asyncio.gather(*(ask(client, *each) for each in asked))
            for (model, content), answer in zip(asked, answers, strict=True):
                assert answer == wanted[model].chat(content, 12), (model, content[:9])
        assert len({wanted[model].chat(LONG, 12) for model in ("tiny", *NAMES)}) == 4
        pulls = [worker._core.status().pulls for worker in workers_of(running)]
        assert any(each.num_ok for own in pulls for each in own)  # KV moved with adapters
        listed = (await client.get("/v1/models")).json()["data"]
        parents = {each["id"]: each["parent"] for each in listed}
        assert parents == {"tiny": None, **dict.fromkeys(NAMES, "tiny")}


async def test_preempted_sequences_go_on_with_their_adapter(
    place: Path, wanted: dict[str, SingleEngine]
) -> None:
    tight = replace(LORA, num_gpu_blocks_override=32)
    async with fleet(place, NAMES[:2], num_prefill=0, engine=tight) as (running, client):
        asked = [(model, f"question {i}", 100) for i in range(4) for model in NAMES[:2]]
        answers = await asyncio.gather(*(ask(client, *each) for each in asked))
        for (model, content, num), answer in zip(asked, answers, strict=True):
            assert answer == wanted[model].chat(content, num)
        assert workers_of(running)[0]._core.status().num_preempted > 0


async def test_a_drained_worker_hands_its_sequences_over_with_their_adapter(
    place: Path, wanted: dict[str, SingleEngine]
) -> None:
    async with fleet(place, NAMES[:1], num_prefill=0, num_decode=2) as (running, client):
        asked = asyncio.create_task(ask(client, "red", LONG, 200))
        busy = None
        while busy is None:
            await asyncio.sleep(0.005)
            busy = next((w for w in workers_of(running) if w._core.status().num_running), None)
        await running.stop_worker(busy, drain_s=0.2)
        assert await asked == wanted["red"].chat(LONG, 200)


async def test_adapters_are_loaded_and_unloaded_while_the_server_runs(
    place: Path, wanted: dict[str, SingleEngine], tmp_path: Path
) -> None:
    async with fleet(place) as (running, client):
        refused = await post(client, "load", lora_name="red", lora_path=str(tmp_path))
        assert refused.status_code == 400 and "is no LoRA adapter" in refused.text
        path = shutil.copytree(place / "red", tmp_path / "adapter")
        loaded = await post(client, "load", lora_name="mine", lora_path=str(path))
        assert (loaded.status_code, loaded.text) == (
            200,
            "Success: LoRA adapter 'mine' added successfully.",
        )
        assert await ask(client, "mine", LONG) == wanted["red"].chat(LONG, 12)
        # Other weights under the same name: no KV of the old ones is used.
        shutil.copytree(place / "green", path, dirs_exist_ok=True)
        again = await post(client, "load", lora_name="mine", lora_path=str(path))
        assert again.status_code == 400 and "load_inplace" in again.text
        again = await post(client, "load", lora_name="mine", lora_path=str(path), load_inplace=True)
        assert again.status_code == 200
        assert await ask(client, "mine", LONG) == wanted["green"].chat(LONG, 12)
        # A worker that comes later learns of it from the ingress.
        await running.start_worker(running.config.tiers[0], "decode")
        late = workers_of(running)[-1]
        await until(lambda: bool(late._core.status().adapters.entries))  # type: ignore[union-attr]
        gone = await post(client, "unload", lora_name="mine")
        assert gone.text == "Success: LoRA adapter 'mine' removed successfully."
        body = {"model": "mine", "prompt": "x", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 404
        assert (await post(client, "unload", lora_name="mine")).status_code == 400


async def test_changed_files_are_refused_and_end_no_worker(place: Path, tmp_path: Path) -> None:
    """The digest of a request decides, not the name: other weights would make wrong KV."""
    path = shutil.copytree(place / "red", tmp_path / "adapter")
    engine = replace(LORA, max_loras=1)
    async with fleet(place, ("green",), num_prefill=0, engine=engine) as (_, client):
        await post(client, "load", lora_name="mine", lora_path=str(path))
        assert await ask(client, "mine", "x") and await ask(client, "green", "x")
        shutil.copytree(place / "blue", path, dirs_exist_ok=True)  # while it is on no worker
        body = {"model": "mine", "prompt": "x", "max_tokens": 1, "timeout": 5}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 503, answer.text
        assert "have changed since it was loaded; load it again" in answer.text
        assert await ask(client, "green", "x")


@pytest.mark.parametrize("num_ranks", [2])
async def test_ranks_serve_adapters(
    place: Path, wanted: dict[str, SingleEngine], num_ranks: int
) -> None:
    engine = replace(LORA, tensor_parallel_size=num_ranks)
    async with fleet(place, NAMES, num_prefill=0, engine=engine) as (_, client):
        asked = [(model, LONG) for model in ("tiny", *NAMES)]
        answers = await asyncio.gather(*(ask(client, *each) for each in asked))
        for (model, content), answer in zip(asked, answers, strict=True):
            assert answer == wanted[model].chat(content, 12), model
