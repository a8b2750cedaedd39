"""Greedy answers of the demo models, with drafts of each kind and without: the same tokens.

`test_speculation_law` has the other ways to sample, with tiny models. `make test-bench` asks for
200 answers of each kind, and `make test` for a few.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from disagg.config import EngineConfig, SpeculativeConfig, model_path
from disagg.engine.device.build import build_engine
from disagg.engine.engine import Engine
from disagg.engine.sched.drafting import Drafting
from disagg.models.description import ModelDescription, describe_model
from tests import test_local
from tests.engine.device.tiny_engine import answer, run, sequence
from tests.engine.test_speculation_law import glm_with_mtp
from tests.grids import IS_WHOLE, some
from tests.held_out import held_out
from tests.links.fakes import until
from tests.models.heads import write_eagle3, write_medusa

LARGE = model_path("demo-large", None)
CONFIG = EngineConfig(
    device="cpu",
    num_threads=1,
    block_size=16,
    max_model_len=160,
    max_num_seqs=8,
    num_gpu_blocks_override=64,
)
NUM_BLOCKS = 20  # of a worker of the fleet: too few for what it has at a time
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 200 if IS_WHOLE else 8, 96, 32
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ngram": lambda _: {"prompt_lookup_max": 2},
    "draft_model": lambda _: {"model": "demo-small"},
    "early_exit": lambda _: {"exit_layer": 3},
    "eagle3": lambda place: {"model": str(write_eagle3(place, Path(LARGE)))},
    "mtp": lambda _: {},
    "medusa": lambda place: {"model": str(write_medusa(place, Path(LARGE)))},
}


@pytest.mark.parametrize("kind", some([kind for kind in KINDS if kind != "mtp"], KINDS))
def test_greedy_answers(kind: Any, tmp_path: Path) -> None:
    place, config = engine_with(kind, tmp_path)
    found, engine = answers(place, config)
    assert found == without_drafts(place, config.dtype)
    assert engine.scheduler.num_drafted > NUM_PROMPTS


@pytest.mark.usefixtures("no_room_to_grow")
@pytest.mark.parametrize("kind", some(["eagle3"], KINDS))
async def test_greedy_answers_of_a_fleet(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are computed elsewhere, sequences are preempted, and a decode worker is killed.

    What is computed again is computed as a prompt, which is the same only in float32.
    """
    place, config = engine_with(kind, tmp_path, "float32")
    monkeypatch.setattr(test_local, "ENGINE", replace(config, num_gpu_blocks_override=NUM_BLOCKS))
    monkeypatch.setattr(  # of full length, whatever the time model thinks of this machine
        Drafting, "_limits", lambda self, proposer, some, *_: dict.fromkeys(some, 4)
    )
    expected = without_drafts(place, config.dtype)
    async with test_local.cluster(place, "local", 1, 2) as (running, client):

        async def ask(prompt: tuple[int, ...]) -> list[int]:
            fields = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            asked = {"model": place.name, "prompt": prompt, "return_token_ids": True, **fields}
            answered = await client.post("/v1/completions", json=asked)
            assert answered.status_code == 200, answered.text
            found: list[int] = answered.json()["choices"][0]["token_ids"]
            return found

        asked = [asyncio.create_task(ask(each)) for each in prompts(describe_model(place))]
        engines = [each._core._engine for each in running.workers if each.record.role == "decode"]
        victim = next(each for each in running.workers if each._core._engine is engines[0])
        await until(lambda: sum(each.done() for each in asked) > NUM_PROMPTS / 4)
        await until(lambda: engines[0].scheduler.running)
        await running.stop_worker(victim)
        assert await asyncio.gather(*asked) == expected
        pulls = [len(each._core.status().transfers) for each in running.workers]
    assert sum(pulls), "no prompt was computed elsewhere"
    assert all(each.scheduler.num_drafted for each in engines)
    assert sum(each.scheduler.num_preempted for each in engines)


def engine_with(kind: Any, place: Path, dtype: Any = "auto") -> tuple[Path, EngineConfig]:
    """A model, and the configuration of an engine with drafts of a kind for it."""
    model = Path(LARGE)
    if kind == "mtp":  # without the compiled step only float32 gives the same for one row and many
        model, dtype = glm_with_mtp(place / "glm"), "float32"
    drafts = SpeculativeConfig(method=kind, **KINDS[kind](place))
    return model, replace(CONFIG, speculative_config=drafts, dtype=dtype)


@cache
def without_drafts(place: Path, dtype: Any) -> list[list[int]]:
    return answers(place, replace(CONFIG, dtype=dtype))[0]


def answers(place: Path, config: EngineConfig) -> tuple[list[list[int]], Engine]:
    """Those to all prompts, and the engine that has given them."""
    model = describe_model(place)
    engine, _ = build_engine(config, model)
    asked = [
        sequence(None, prompt, temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=())
        for prompt in prompts(model)
    ]
    assert set(run(engine, *asked)) == {"length"}
    return [answer(each) for each in asked], engine


def prompts(model: ModelDescription) -> list[tuple[int, ...]]:
    """The ends of texts that the demo models know, and random tokens."""
    tokenizer, rng = Tokenizer.from_str(model.read_tokenizer()), random.Random(1)
    texts = [tokenizer.encode(each.prompt).ids[-NUM_PROMPT_TOKENS:] for each in held_out()]
    rng.shuffle(texts)
    while len(texts) < NUM_PROMPTS:
        texts.append([rng.randrange(3, 250) for _ in range(NUM_PROMPT_TOKENS)])
    return [tuple(text) for text in texts[:NUM_PROMPTS]]
