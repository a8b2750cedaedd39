"""Greedy answers of the demo models, with drafts of each kind and without: the same tokens.

`test_speculation_law` has the other ways to sample, with tiny models. `make test-bench` asks for
200 answers of each kind, and `make test` for a few.
"""

from __future__ import annotations

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
from disagg.models.description import ModelDescription, describe_model
from tests.engine.device.tiny_engine import answer, run, sequence
from tests.engine.test_speculation_law import glm_with_mtp
from tests.grids import IS_WHOLE
from tests.held_out import held_out
from tests.models.heads import write_eagle3

LARGE = model_path("demo-large", None)
CONFIG = EngineConfig(
    device="cpu",
    num_threads=1,
    block_size=16,
    max_model_len=160,
    max_num_seqs=8,
    num_gpu_blocks_override=64,
)
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 200 if IS_WHOLE else 16, 96, 32
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ngram": lambda _: {"prompt_lookup_max": 2},
    "draft_model": lambda _: {"model": "demo-small"},
    "early_exit": lambda _: {"exit_layer": 3},
    "eagle3": lambda place: {"model": str(write_eagle3(place, Path(LARGE)))},
    "mtp": lambda _: {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers(kind: Any, tmp_path: Path) -> None:
    model = Path(LARGE) if kind != "mtp" else glm_with_mtp(tmp_path / "glm")
    # Without the compiled step only float32 gives the same for one row and for many.
    config = CONFIG if kind != "mtp" else replace(CONFIG, dtype="float32")
    drafts = SpeculativeConfig(method=kind, **KINDS[kind](tmp_path))
    expected, _ = without_drafts(model, config.dtype)
    with_drafts = replace(config, speculative_config=drafts)
    found, num_drafted = answers(describe_model(model), with_drafts)
    assert found == expected
    assert num_drafted > NUM_PROMPTS


@cache
def without_drafts(model: Path, dtype: Any) -> tuple[list[list[int]], int]:
    return answers(describe_model(model), replace(CONFIG, dtype=dtype))


def answers(model: ModelDescription, config: EngineConfig) -> tuple[list[list[int]], int]:
    """The tokens of each answer, and of all drafts."""
    engine, _ = build_engine(config, model)
    asked = [
        sequence(None, prompt, temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=())
        for prompt in prompts(model)
    ]
    assert set(run(engine, *asked)) == {"length"}
    return [answer(each) for each in asked], engine.scheduler.num_drafted


def prompts(model: ModelDescription) -> list[tuple[int, ...]]:
    """The ends of texts that the demo models know, and random tokens."""
    tokenizer, rng = Tokenizer.from_str(model.read_tokenizer()), random.Random(1)
    texts = [tokenizer.encode(each.prompt).ids[-NUM_PROMPT_TOKENS:] for each in held_out()]
    rng.shuffle(texts)
    while len(texts) < NUM_PROMPTS:
        texts.append([rng.randrange(3, 250) for _ in range(NUM_PROMPT_TOKENS)])
    return [tuple(text) for text in texts[:NUM_PROMPTS]]
