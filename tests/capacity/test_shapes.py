"""Parameters and KV bytes are those that the models' makers publish."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from disagg.capacity.shapes import SHAPES, ModelShape, read_shape
from disagg.errors import ModelError
from disagg.kernels.kv_pages import FORMATS
from tests.models.popular import POPULAR

PUBLISHED_BILLIONS = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "mistral-7b": 7.25,
    "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "mixtral-8x7b": 46.70,
    "qwen1.5-moe-a2.7b": 14.32,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "deepseek-r1": 671.0,
    "deepseek-v3.2": 671.9,
    "kimi-k2": 1026.4,
}
# That a token goes through, as their makers count them: layers and the table of logits; Qwen
# counts the other table too.
ACTIVE_BILLIONS = {
    "mixtral-8x7b": 12.9,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
    "deepseek-r1": 37,
    "deepseek-v3.2": 38,
    "kimi-k2": 32,
}


def test_every_known_model_has_the_published_number_of_parameters() -> None:
    assert PUBLISHED_BILLIONS.keys() == SHAPES.keys()
    for name, billions in PUBLISHED_BILLIONS.items():
        assert SHAPES[name].num_params / 1e9 == pytest.approx(billions, rel=1e-3), name


def test_active_parameters_are_those_that_are_published() -> None:
    sparse = {name for name, shape in SHAPES.items() if shape.num_experts}
    assert ACTIVE_BILLIONS.keys() == sparse
    for name, billions in ACTIVE_BILLIONS.items():
        shape = SHAPES[name]
        num_tables = 2 if name.startswith("qwen") else 1
        active = shape.num_layer_params + num_tables * shape.num_head_params
        assert active / 1e9 == pytest.approx(billions, rel=0.03), name


def test_a_step_reads_the_experts_that_its_tokens_go_through() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    one = shape.read_nbytes(1, "bf16")
    assert one == pytest.approx(2 * (shape.num_layer_params + shape.num_head_params))
    whole = shape.weights_nbytes("bf16") - 2 * shape.num_head_params  # a row of the other table
    assert one < shape.read_nbytes(16, "bf16") < 0.7 * whole
    assert shape.read_nbytes(4096, "bf16") == pytest.approx(whole)
    dense = SHAPES["llama-3-8b"]
    assert dense.read_nbytes(1, "bf16") == dense.read_nbytes(4096, "bf16")


@pytest.mark.parametrize("num_tokens", [1, 8, 32, 256])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_the_busiest_rank_with_whole_experts_is_that_of_chance(
    num_tokens: int, num_ranks: int
) -> None:
    shape, rng = SHAPES["qwen3-30b-a3b"], np.random.default_rng(3)
    read, multiplied = [], []
    for _ in range(300):
        chosen = rng.random((num_tokens, 128)).argpartition(8, axis=1)[:, :8]
        counts = np.bincount(chosen.flatten(), minlength=128).reshape(num_ranks, -1)
        read.append((counts > 0).sum(1).max() * num_ranks)
        multiplied.append(counts.sum(1).max() * num_ranks / num_tokens)
    none = shape.read_nbytes(num_tokens, "bf16") - _nbytes_of(shape, num_tokens)
    busiest = shape.read_nbytes(num_tokens, "bf16", num_ranks) - none
    of_one = 2 * shape._num_params_per_expert
    assert busiest / of_one == pytest.approx(np.mean(read), rel=0.1)
    others = shape.num_layer_params - 8 * shape._num_params_per_expert
    found = shape.num_multiplied_params(num_tokens, num_ranks) - others
    assert found / shape._num_params_per_expert == pytest.approx(np.mean(multiplied), rel=0.1)


def _nbytes_of(shape: ModelShape, num_tokens: int) -> float:
    """In bf16, of the experts that a step reads."""
    read = shape.num_experts * (1 - (1 - 8 / shape.num_experts) ** num_tokens)
    return 2 * read * shape._num_params_per_expert


def test_the_first_rank_has_most_of_whole_experts() -> None:
    shape = SHAPES["qwen1.5-moe-a2.7b"]  # 60 of them
    more = shape.weights_nbytes("bf16", 8) - shape.weights_nbytes("bf16")
    assert more == pytest.approx(2 * 4 * shape._num_params_per_expert)
    assert shape.weights_nbytes("bf16", 4) == shape.weights_nbytes("bf16")
    dense = SHAPES["llama-3-8b"]
    assert dense.weights_nbytes("bf16", 8) == dense.weights_nbytes("bf16")
    assert dense.read_nbytes(3, "bf16", 8) == dense.read_nbytes(3, "bf16")
    assert dense.num_multiplied_params(3, 8) == dense.num_layer_params


def test_experts_of_four_bits() -> None:
    """The files of gpt-oss have 13.8 and 65.2 GB."""
    assert SHAPES["gpt-oss-20b"].weights_nbytes("bf16") / 1e9 == pytest.approx(13.76, rel=0.01)
    assert SHAPES["gpt-oss-120b"].weights_nbytes("bf16") / 1e9 == pytest.approx(65.25, rel=0.01)
    on_cpu = replace(SHAPES["gpt-oss-20b"], is_widened=True)
    assert on_cpu.weights_nbytes("bf16") / 2 == on_cpu.num_params
    assert on_cpu.stored_as("bf16") == on_cpu.products_in("bf16") == "bf16"


def test_kv_of_the_textbooks() -> None:
    assert SHAPES["llama-3-70b"].kv_nbytes_per_token() == 320 * 1024
    assert SHAPES["llama-3-70b"].kv_nbytes_per_token("fp8") == (160 + 5) * 1024
    assert SHAPES["llama-3-70b"].kv_nbytes_per_token("int4") == (80 + 5) * 1024
    of_heads = [shape for shape in SHAPES.values() if not shape.latent_size]
    for shape, name in product(of_heads, ("int8", "int4")):
        page_nbytes = FORMATS[name].page_nbytes(64, shape.head_dim)  # of an engine, on a GPU
        num_pages = 2 * shape.config.num_layers * shape.config.num_kv_heads
        assert 64 * shape.kv_nbytes_per_token(name) == num_pages * page_nbytes
    assert SHAPES["llama-2-13b"].kv_nbytes_per_token() == 800 * 1024
    assert SHAPES["deepseek-r1"].kv_nbytes_per_token() == 61 * 576 * 2  # "70 KB"
    assert SHAPES["deepseek-v3.2"].kv_nbytes_per_token() == 61 * (576 + 128) * 2
    assert SHAPES["llama-3-8b"].kv_nbytes_per_token() == 128 * 1024


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-v3.2", "kimi-k2"])
def test_latents_of_a_config_are_those_of_the_table(name: str, tmp_path: Path) -> None:
    known = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(POPULAR[known.repository].config))
    shape = read_shape(str(tmp_path))
    assert shape.kv_nbytes_per_token() == known.kv_nbytes_per_token()
    assert shape.num_params == known.num_params
    assert shape.num_latent_flop == known.num_latent_flop
    assert shape.head_dim == (576 + 512) // 2  # of the products of a prompt, with latents


def test_a_directory_needs_no_more_than_its_config(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "disagg/assets/demo-small/config.json"
    (tmp_path / "config.json").write_text(demo.read_text())
    shape = read_shape(str(tmp_path))
    assert shape.name == tmp_path.name
    assert str(tmp_path) in shape.source
    assert shape.config.tie_word_embeddings
    # 4 layers of (2 x (4 + 2) heads of 32 + 3 x 384) x 128, and one table of 1024 x 128
    assert shape.num_params == 4 * 128 * (2 * 6 * 32 + 3 * 384) + 1024 * 128


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gpt-5 is neither .* known models: llama-2-7b"):
        read_shape("gpt-5")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel \(not yet: .*; supported are LlamaFor"):
        read_shape(str(tmp_path))
