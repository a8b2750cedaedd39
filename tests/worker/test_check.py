"""What a start says of decode steps on a CPU: compiled ones, and whose steps torch computes."""

from __future__ import annotations

import json
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from disagg.config_checks import parse_config
from disagg.kernels.cpu.library import Found
from disagg.worker import check
from tests.models.popular import POPULAR

DENSE, EXPERTS = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B-Instruct-2507"
LATENTS, SINKS = "deepseek-ai/DeepSeek-R1", "openai/gpt-oss-20b"
GELU = "google/gemma-7b-it"


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_step", lambda: Found(CDLL(None), "compiled"))


def sentence_of(directory: Path, *tiers: tuple[str, dict[str, Any]]) -> str:
    """Of tiers "0", "1", ... with these models, in bf16 if nothing else is asked for."""
    raw = []
    for number, (name, more) in enumerate(tiers):
        place = directory / str(number)
        place.mkdir()
        (place / "config.json").write_text(json.dumps(POPULAR[name].config))
        engine = {"device": "cpu", "dtype": "bfloat16", **more.pop("engine", {})}
        raw.append({"model": str(place), "engine": engine, **more})
    return check.cpu_steps_sentence(parse_config({"tiers": raw, "cluster_key": "key"}).tiers)


@pytest.mark.parametrize(
    ("name", "engine", "sentence"),
    [
        (DENSE, {}, "compiled"),
        (DENSE, {"dtype": "float32"}, "torch for 0, which computes in float32"),
        (EXPERTS, {}, "torch for 0, whose model has experts"),
        (LATENTS, {}, "torch for 0, whose model has experts and latents"),
        (SINKS, {}, "torch for 0, whose model has experts and attention sinks"),
        (GELU, {}, "torch for 0, whose model has norms in float32, scaled embeddings and GELU"),
    ],
)
def test_only_the_steps_of_dense_models_in_bf16_are_compiled(
    name: str, engine: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    assert sentence_of(tmp_path, (name, {"engine": engine})) == sentence


def test_ranks_and_tiers_are_told_apart(tmp_path: Path) -> None:
    two = {"prefill": {"num_replicas": 1}, "decode": {"tensor_parallel_size": 2}}
    assert sentence_of(tmp_path, (DENSE, two), (LATENTS, {})) == (
        "compiled; torch for 0-decode, whose workers have several ranks;"
        " torch for 1, whose model has experts and latents"
    )


def test_nothing_is_compiled_where_all_workers_have_several_ranks(tmp_path: Path) -> None:
    alone = {"prefill": {"num_replicas": 0}, "engine": {"tensor_parallel_size": 2}}
    assert sentence_of(tmp_path, (DENSE, alone)) == (
        "torch for 0-decode, whose workers have several ranks"
    )


def test_where_none_is_compiled_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_step", lambda: Found(None, "torch, because none is here"))
    assert sentence_of(tmp_path, (LATENTS, {})) == "torch, because none is here"
