"""What is unsupported is refused in words; `test_against_transformers` compares the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GlmMoeDsaConfig

from disagg.errors import ModelError
from disagg.models.description import describe_model
from disagg.models.model_config import ModelConfig
from tests.models.popular import POPULAR

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def _write(directory: Path, config: Any, generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    save_file({"x": torch.arange(8.0)}, directory / "model.safetensors")
    return directory


def _read(directory: Path, **changes: Any) -> ModelConfig:
    return describe_model(_write(directory, {**LLAMA, **changes})).config


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_old_and_new_names_of_the_dtype(tmp_path: Path, key: str) -> None:
    assert _read(tmp_path).dtype == "float32"
    assert _read(tmp_path, **{key: "bfloat16"}).dtype == "bfloat16"


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert _read(tmp_path, rope_scaling=scaling).max_model_len == 512


def test_generation_config_says_what_ends_an_answer(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2]}
    assert describe_model(_write(tmp_path, LLAMA, generation)).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["must be a list, not 'LlamaForCausalLM'"]),
        ({"architectures": ["CohereForCausalLM"]}, ["not yet: attention and MLP in"]),
        ({"architectures": None}, ["without architectures", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantised (hqq)", "gptq"]),
        ({"rope_scaling": {"rope_type": "ntk"}}, ["'ntk'", "llama3", "longrope"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["short_factor", "list of numbers"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"num_key_value_heads": 3}, ["3 KV heads"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window"]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["linear_attention"] * 4,
            },
            ["layer_types", "linear_attention"],
        ),
        ({"hidden_size": "wide"}, ["config.json", "wide"]),
        ({"hidden_size": 0}, ["hidden_size must be a positive number"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0"]),
        ({"vocab_size": -5}, ["vocab_size", "-5"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers"]),
        ({"head_dim": 15}, ["size 15", "the size must be even"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}, ["factor", "-1.0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling must be a JSON object"]),
    ],
)
def test_refusals_say_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as refused:
        _read(tmp_path, **changes)
    for word in words:
        assert word in refused.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": None}, "q_lora_rank must be set"),
        ({"index_topk": 0}, "index_topk must be a positive number"),
        ({"index_head_dim": 62}, "index_head_dim must be even and at least qk_rope_head_dim, 64"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave must be true"),
        ({"indexer_types": ["full"] * 77}, "indexer_types must name 78 layers as full or shared"),
        ({"index_topk_pattern": "S" + "F" * 77}, "must call the first layer full"),
        ({"index_topk_pattern": "FX" * 39}, "indexer_types must name .* found 78 with X"),
        ({"index_topk_freq": "4"}, "index_topk_freq and index_skip_topk_offset must be whole"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types must name 78 layers as indexed"),
    ],
)
def test_an_index_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_hf({**POPULAR["zai-org/GLM-5"].config, **changes}, "config.json")


def test_layers_share_what_another_has_chosen() -> None:
    """As the class in transformers reads these keys."""
    glm = POPULAR["zai-org/GLM-5"].config
    for more in ({"index_topk_freq": 4}, {"index_topk_pattern": "FSS" * 26}, {}):
        kinds = GlmMoeDsaConfig(**{"num_hidden_layers": 78, **more}).indexer_types
        latent = ModelConfig.from_hf({**glm, **more}, "config.json").latent
        assert latent is not None and latent.index is not None
        shared = {layer for layer, kind in enumerate(kinds) if kind == "shared"}
        assert latent.index.sharing_layers == shared


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_id_is_refused(tmp_path: Path, file: str) -> None:
    _write(tmp_path, LLAMA, {})
    ends = {**(LLAMA if file == "config.json" else {}), "eos_token_id": "</s>"}
    (tmp_path / file).write_text(json.dumps(ends))
    with pytest.raises(ModelError, match=rf"/{file} is wrong: eos_token_id .* not '</s>'"):
        tuple(describe_model(tmp_path).eos_token_ids)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    without = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(ModelError, match=r"config\.json has no 'hidden_size'"):
        describe_model(_write(tmp_path, without))


def test_missing_directory_and_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model directory at"):
        describe_model(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be read"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="one JSON object"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        dict(describe_model(tmp_path).tensors)


def test_fingerprint_follows_weights_and_architecture(tmp_path: Path) -> None:
    first = describe_model(_write(tmp_path, LLAMA)).fingerprint
    assert describe_model(_write(tmp_path, LLAMA)).fingerprint == first
    assert describe_model(_write(tmp_path, {**LLAMA, "rope_theta": 1e6})).fingerprint != first
    _write(tmp_path, LLAMA)
    save_file({"x": torch.arange(8.0) + 1}, tmp_path / "model.safetensors")
    assert describe_model(tmp_path).fingerprint != first
