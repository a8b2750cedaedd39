"""Loading: shards and what is odd in old files; whatever does not fit is named."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.random_models import random_weights
from disagg.errors import ModelError
from disagg.models.checkpoint import checkpoint_files
from disagg.models.description import describe_model
from disagg.models.weights import DecoderWeights, LayerWeights, load_weights
from tests.models.checkpoints import write_checkpoint

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Loaded(DecoderWeights):
    layers: Sequence[LayerWeights]


def _load(directory: Path, dtype: torch.dtype = torch.float32) -> _Loaded:
    weights = load_weights(describe_model(directory), dtype, CPU)
    layers = [*weights.layers]
    return _Loaded(weights.embedding, layers, weights.norm, weights.lm_head, dtype)


def _edit(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """Rewrite the one file of a checkpoint; None removes a tensor."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def test_shards_hold_the_same_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", "llama")
    write_checkpoint(tmp_path / "many", "llama", shard="40KB")
    assert len(checkpoint_files(tmp_path / "many")) > 3
    one, many = _load(tmp_path / "one"), _load(tmp_path / "many")
    assert torch.equal(one.lm_head, many.lm_head)
    assert torch.equal(one.layers[2].down, many.layers[2].down)


@pytest.mark.parametrize("variant", ["qwen3-mixed-windows", "deepseek-v3"])
def test_random_weights_have_the_shapes_of_loaded_ones(variant: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant)
    config = describe_model(tmp_path).config
    loaded, drawn = _load(tmp_path), random_weights(config, torch.float32, CPU, seed=0)
    for mine, theirs in zip(drawn.layers, loaded.layers, strict=True):
        for field in mine.__dataclass_fields__:
            one, other = getattr(mine, field), getattr(theirs, field)
            assert (one is None) == (other is None), field
            assert one is None or one.shape == other.shape, field
    assert torch.equal(drawn.embedding, random_weights(config, torch.float32, CPU, 0).embedding)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    _edit(
        tmp_path,
        {
            "model.layers.0.mlp.up_proj.weight": None,
            "model.layers.9.extra": torch.zeros(2),
            "model.norm.weight": torch.ones(47),
        },
    )
    with pytest.raises(ModelError) as refused:
        _load(tmp_path)
    message = refused.value.message
    assert "missing tensors: model.layers.0.mlp.up_proj.weight" in message
    assert "unexpected tensors: model.layers.9.extra" in message
    assert "model.norm.weight is [47], not [48]" in message


def test_old_checkpoints_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    _edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert _load(tmp_path).norm.shape == (48,)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek-v3")
    names = ("self_attn.q_a_proj.weight", "eh_proj.weight", "shared_head.norm.weight")
    _edit(tmp_path, {f"model.layers.3.{name}": torch.zeros(2, 3) for name in names})
    assert len(_load(tmp_path).layers) == 3
    _edit(tmp_path, {"model.layers.4.enorm.weight": torch.ones(2)})
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.4\.enorm"):
        _load(tmp_path)


def test_the_biases_of_a_choice_keep_their_bits(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, "deepseek-v3").model.state_dict()
    wanted = state["model.layers.1.mlp.gate.e_score_correction_bias"]
    found = _load(tmp_path, torch.bfloat16).layers[1].score_bias
    assert found is not None and torch.equal(found, wanted)
    assert not torch.equal(wanted.bfloat16().float(), wanted)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_refused_by_name(tmp_path: Path, bad: float) -> None:
    write_checkpoint(tmp_path, "llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    damaged = load_file(tmp_path / "model.safetensors")[name]
    damaged[3, 5] = bad
    _edit(tmp_path, {name: damaged})
    with pytest.raises(ModelError, match=name):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "outside its directory"),
        ({"weight_map": {"a": "absent.safetensors"}}, "missing: absent.safetensors"),
        ({}, "is broken"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: object, words: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=words):
        checkpoint_files(tmp_path)


def test_an_output_matrix_that_differs_is_used_although_it_is_said_to_be_tied(
    tmp_path: Path,
) -> None:
    """As in transformers, which warns."""
    written = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = written.model.lm_head.weight
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, head)
    assert torch.equal(_load(tmp_path).lm_head, head)
    (remark,) = describe_model(tmp_path).remarks
    assert "lm_head.weight that differs" in remark
    _edit(tmp_path, {"lm_head.weight": written.model.model.embed_tokens.weight.detach().clone()})
    loaded = _load(tmp_path)
    assert loaded.lm_head is loaded.embedding
    assert describe_model(tmp_path).remarks == []
