"""Parameters and KV bytes are those that the models' makers publish."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from disagg.errors import ModelError
from disagg.kernels.kv_pages import FORMATS
from disagg.planner.shapes import SHAPES, read_shape

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
}


def test_every_known_model_has_the_published_number_of_parameters() -> None:
    assert PUBLISHED_BILLIONS.keys() == SHAPES.keys()
    for name, billions in PUBLISHED_BILLIONS.items():
        assert SHAPES[name].num_params / 1e9 == pytest.approx(billions, rel=1e-3), name


def test_kv_of_the_textbooks() -> None:
    assert SHAPES["llama-3-70b"].kv_nbytes_per_token() == 320 * 1024
    assert SHAPES["llama-3-70b"].kv_nbytes_per_token("fp8") == (160 + 5) * 1024
    assert SHAPES["llama-3-70b"].kv_nbytes_per_token("int4") == (80 + 5) * 1024
    for shape, name in product(SHAPES.values(), ("int8", "int4")):
        page_nbytes = FORMATS[name].page_nbytes(64, shape.head_dim)  # of an engine, on a GPU
        num_pages = 2 * shape.num_layers * shape.num_kv_heads
        assert 64 * shape.kv_nbytes_per_token(name) == num_pages * page_nbytes
    assert SHAPES["llama-2-13b"].kv_nbytes_per_token() == 800 * 1024
    assert SHAPES["llama-3-8b"].kv_nbytes_per_token() == 128 * 1024


def test_a_directory_needs_no_more_than_its_config(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "disagg/assets/demo-small/config.json"
    (tmp_path / "config.json").write_text(demo.read_text())
    shape = read_shape(str(tmp_path))
    assert shape.name == tmp_path.name
    assert str(tmp_path) in shape.source
    assert shape.tie_word_embeddings
    # 4 layers of (2 x (4 + 2) heads of 32 + 3 x 384) x 128, and one table of 1024 x 128
    assert shape.num_params == 4 * 128 * (2 * 6 * 32 + 3 * 384) + 1024 * 128


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gpt-5 is neither .* known models: llama-2-7b"):
        read_shape("gpt-5")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="GPT2LMHeadModel; supported are LlamaForCausalLM"):
        read_shape(str(tmp_path))
