"""What does not fit in a quantised checkpoint is refused in words, and what is odd is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.config import ASSETS, EngineConfig
from disagg.engine.device.check import check_engine
from disagg.errors import ModelError
from disagg.kernels.torch.ops import TorchOps
from disagg.models.decoder import load_model
from disagg.models.description import ModelDescription, describe_model
from tests.models.checkpoints import assert_logits_are_transformers
from tests.models.gguf_files import write_gguf
from tests.models.gpu_ops import FakeGpuOps
from tests.models.quantized_files import (
    AWQ,
    FP8,
    GPT_OSS,
    MODELOPT,
    all_tensors,
    compressed,
    gptq,
    write_quantized,
)
from tests.models.test_gguf import small_model

CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]
ENGINE = EngineConfig(device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20)
DOWN = "model.layers.1.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def _write(directory: Path, kind: str) -> Path:
    variant, sizes = ("gpt-oss", GPT_OSS) if kind == "mxfp4" else ("llama", {})
    return write_quantized(directory, variant, kind, **sizes).directory


def _rewrite(directory: Path, change: Change, **config: Any) -> Path:
    """Change the tensors of a checkpoint, and its quantization_config."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] |= config
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def _scaled(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("kind", "change", "config", "words"),
    [
        ("fp8 blocks", lambda it: it.pop(f"{DOWN}.weight_scale_inv"), {},
         rf"{DOWN}.weight is quantised, and {DOWN}.weight_scale is missing; download"),
        ("fp8 blocks", lambda it: None, {"weight_block_size": [64, 64]},
         r"weight_scale_inv in .* \[2, 5\], .* should be \[1, 2\]"),
        ("fp8 rows", _scaled(f"{DOWN}.weight_scale", lambda it: it[1:]), {},
         rf"{DOWN}.weight_scale in .* \[47, 1\], .* should be \[48, 1\]"),
        ("fp8 rows", _scaled(f"{DOWN}.weight_scale", lambda it: it.int()), {},
         rf"{DOWN}.weight_scale in .* is I32, but must be F32 or"),
        ("fp8 rows", _scaled(f"{DOWN}.weight", lambda it: it.to(torch.float8_e5m2)), {},
         rf"{DOWN}.weight in .* is F8_E5M2, but must be F8_E4M3"),
        ("fp8 rows", _scaled(f"{DOWN}.weight", lambda it: it.float()), {},
         rf"unexpected tensors: {DOWN}.weight_scale"),
        ("fp8 rows", _scaled(f"{DOWN}.weight", lambda it: it[:, 1:]), {},
         rf"wrong shapes: {DOWN}.weight is \[48, 79\], not \[48, 80\]"),
        ("int8", _scaled(f"{DOWN}.weight", lambda it: it.to(torch.float8_e4m3fn)), {},
         rf"{DOWN}.weight in .* is F8_E4M3, but must be I8"),
        ("packed", lambda it: it.pop(f"{DOWN}.weight_shape"), {},
         rf"{DOWN}.weight_packed is quantised, and {DOWN}.weight_shape is missing"),
        ("packed", lambda it: it.update({f"{DOWN}.weight": torch.ones(48, 80)}), {},
         rf"{DOWN}.weight is in .* twice"),
        ("packed", lambda it: None, compressed("pack-quantized", 4, "group", group_size=24),
         r"weight_scale in .* \[48, 5\], .* should be \[48, 4\]"),
        ("packed", lambda it: None,
         compressed("pack-quantized", 4, "group", group_size=16, actorder="group"),
         "weight_g_idx is missing"),
        ("awq", lambda it: it.pop(f"{DOWN}.qzeros"), {},
         rf"{DOWN}.qweight is quantised, and {DOWN}.qzeros is missing"),
        ("awq", lambda it: None, {"group_size": 10}, r"scales in .* \[5, 48\], .* \[8, 48\]"),
        ("gptq", lambda it: it.pop(f"{DOWN}.scales"), {}, rf"{DOWN}.scales is missing"),
        ("gptq in order of activations", lambda it: it.pop(f"{DOWN}.g_idx"), {},
         rf"{DOWN}.qweight is quantised, and {DOWN}.g_idx is missing"),
        ("gptq", lambda it: it.update({f"{DOWN}.bias": torch.ones(48)}), {},
         rf"unexpected tensors: {DOWN}.bias"),
        ("gptq", lambda it: it.pop(f"{DOWN}.qweight"), {},
         rf"missing tensors: {DOWN}.weight; unexpected tensors: {DOWN}."),
        ("nvfp4", lambda it: it.pop(f"{DOWN}.weight_global_scale"), {},
         rf"{DOWN}.weight_packed is quantised, and {DOWN}.weight_global_scale is missing; down"),
        ("nvfp4 of modelopt", lambda it: it.pop(f"{DOWN}.weight_scale_2"), {},
         rf"{DOWN}.weight is quantised, and {DOWN}.weight_scale_2 is missing; download"),
        ("nvfp4 of modelopt",
         _scaled(f"{DOWN}.weight", lambda it: it.view(torch.float8_e4m3fn)), {},
         rf"{DOWN}.weight in .* is F8_E4M3, but must be U8"),
        ("nvfp4 of modelopt", _scaled(f"{DOWN}.weight_scale", lambda it: it[:, 1:]), {},
         rf"{DOWN}.weight_scale in .* \[48, 4\], .* should be \[48, 5\]"),
        ("nvfp4 of modelopt", _scaled(f"{DOWN}.weight_scale", lambda it: it.float()), {},
         rf"{DOWN}.weight_scale in .* is F32, but must be F8_E4M3"),
        ("mxfp4", _scaled(f"{EXPERTS}_blocks", lambda it: it.float()), {},
         f"{EXPERTS}_blocks in .* is F32, but must be U8"),
        ("mxfp4", _scaled(f"{EXPERTS}_blocks", lambda it: it[..., 1:]), {},
         r"_blocks in .* \[5, 64, 3, 15\], .* should be \[5, 64, 3, 16\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_starts(
    kind: str, change: Change, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    directory = _write(tmp_path, kind)
    check_engine(ENGINE, describe_model(directory))
    with pytest.raises(ModelError, match=words):
        check_engine(ENGINE, describe_model(_rewrite(directory, change, **config)))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("fp8 rows", _scaled(f"{DOWN}.weight_scale", lambda it: it * float("nan")), "holds? NaN"),
        ("fp8 tensor",
         _scaled(f"{DOWN}.weight",
                 lambda it: torch.full_like(it.view(torch.uint8), 127).view(it.dtype)),
         f"{DOWN}.weight in .* holds NaN"),
        ("packed", _scaled(f"{DOWN}.weight_shape", lambda it: it + 1),
         rf"{DOWN}.weight in .* is damaged: weight_shape says \[49, 81\]"),
        ("gptq", _scaled(f"{DOWN}.g_idx", lambda it: it - 1),
         f"{DOWN}.weight in .* is damaged: g_idx names groups that are not from 0 to 4"),
        ("fp8 tensor", _scaled(f"{DOWN}.input_scale", lambda it: it * 0.0),
         f"{DOWN}.weight in .* is damaged: the scale of its activations is 0.0"),
        ("nvfp4", _scaled(f"{DOWN}.weight_global_scale", lambda it: it * 0.0),
         f"{DOWN}.weight in .* is damaged: its weight_global_scale is 0.0"),
        ("nvfp4",
         _scaled(f"{DOWN}.weight_scale",
                 lambda it: torch.full_like(it.view(torch.uint8), 127).view(it.dtype)),
         f"{DOWN}.weight in .* (holds NaN|scales hold NaN)"),
        ("mxfp4", _scaled(f"{EXPERTS}_scales", lambda it: it | 255),
         f"{EXPERTS} in .* (holds NaN|scales hold NaN)"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(
    kind: str, change: Change, words: str, tmp_path: Path
) -> None:
    """Whether it is widened, or kept as it is."""
    directory = _write(tmp_path, kind)
    model = describe_model(_rewrite(directory, change))
    for ops in (TorchOps(), FakeGpuOps()):
        with pytest.raises(ModelError, match=words):
            load_model(model, torch.float32, CPU, ops=ops)


def test_groups_that_compressed_tensors_left_without_an_order(tmp_path: Path) -> None:
    """It writes -1 where it rounded without calibration."""
    directory = _write(tmp_path, "packed")
    wanted = all_tensors(directory)["1.down"]
    unnamed = {f"{DOWN}.weight_g_idx": torch.full((80,), -1, dtype=torch.int32)}
    _rewrite(directory, lambda it: it.update(unnamed))
    assert torch.equal(all_tensors(directory)["1.down"], wanted)


def test_biases_of_zeros_are_no_biases(tmp_path: Path) -> None:
    """GPTQ gives one to every matrix, of models without any, too."""
    directory = _write(tmp_path, "gptq")
    _rewrite(directory, lambda it: it.update({f"{DOWN}.bias": torch.zeros(48)}))
    load_model(describe_model(directory), torch.float32, CPU)


def test_what_only_modelopts_own_file_says(tmp_path: Path) -> None:
    """As its older checkpoints have it."""
    directory = _write(tmp_path, "nvfp4 of modelopt")
    wanted = all_tensors(directory)
    raw = json.loads((directory / "config.json").read_text())
    del raw["quantization_config"]
    (directory / "config.json").write_text(json.dumps(raw))
    of_weights = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    file = directory / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": of_weights}))
    found = all_tensors(directory)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    file.write_text("[]")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        describe_model(directory)


def test_scales_of_kv_are_left_alone(tmp_path: Path) -> None:
    directory = _write(tmp_path, "float tensor")
    scale, attention = torch.tensor(0.5), "model.layers.0.self_attn"
    more = {f"{attention}.{end}": scale.clone() for end in ("k_scale", "v_proj.v_scale")}
    _rewrite(directory, lambda it: it.update(more))
    load_model(describe_model(directory), torch.float32, CPU)


def _with_inputs(**settings: Any) -> dict[str, Any]:
    """A configuration with quantised activations."""
    config = compressed("float-quantized", 8, "tensor")
    config["config_groups"]["group_0"]["input_activations"] = settings
    return config


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.mark.parametrize(
    ("kind", "config", "qkv", "down"),
    [
        ("fp8 tensor", {}, 2.0, 0.25),
        ("fp8 tensor", {"activation_scheme": "dynamic"}, 0.0, 0.0),
        ("fp8 blocks", {}, 0.0, 0.0),
        ("float tensor", {}, None, None),
        ("float tensor", _with_inputs(**_FLOAT8, dynamic=False), 2.0, 0.25),
        ("float tensor", _with_inputs(**_FLOAT8, dynamic=True, strategy="token"), 0.0, 0.0),
        ("float tensor", _with_inputs(**{**_FLOAT8, "type": "int"}), None, None),
        ("float tensor", _with_inputs(**{**_FLOAT8, "symmetric": False}), None, None),
        ("int8", compressed("pack-quantized", 8, "channel"), None, None),
    ],
)
def test_how_activations_are_quantised_is_read(
    kind: str, config: dict[str, Any], qkv: float | None, down: float | None, tmp_path: Path
) -> None:
    """Matrices that are one product have the largest scale of theirs."""
    kind = "packed 8 bits" if kind == "int8" else kind
    directory, attention = _write(tmp_path, kind), "model.layers.1.self_attn"
    scales = {
        f"{attention}.{name}_proj": scale
        for name, scale in zip("qkv", (0.5, 2.0, 1.0), strict=True)
    }
    scales[DOWN] = 0.25
    inputs = {f"{name}.input_scale": torch.tensor([scale]) for name, scale in scales.items()}
    found = all_tensors(
        _rewrite(directory, lambda it: it.update(inputs), **config), keeps_packed="gpu"
    )
    assert (found["1.qkv"].input_scale, found["1.down"].input_scale) == (qkv, down)


def test_scales_that_are_powers_of_two_in_a_byte(tmp_path: Path) -> None:
    directory = _write(tmp_path, "fp8 rows")
    name = f"{DOWN}.weight_scale"
    floats = torch.tensor([2.0 ** -(row % 9) for row in range(48)])[:, None]
    exponents = torch.tensor([127 - row % 9 for row in range(48)], dtype=torch.uint8)[:, None]
    _rewrite(directory, lambda it: it.update({name: floats}))
    wanted = all_tensors(directory)["1.down"]
    _rewrite(directory, lambda it: it.update({name: exponents.view(torch.float8_e8m0fnu)}))
    assert torch.equal(all_tensors(directory)["1.down"], wanted)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, r"\(bitsandbytes\), which .* are float weights, "
         "fp8, compressed-tensors, awq, gptq, modelopt"),
        ({"bits": 4}, r"quantised \(None\), which is not supported"),
        ("awq", r"quantised \(awq\)"),
        ({**FP8, "weight_block_size": [128]}, "blocks of"),
        ({**FP8, "weight_block_size": [0, 128]}, "blocks of"),
        ({**AWQ, "bits": 3}, "3 bits; supported is 4 bits"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'; supported is gemm"),
        ({**AWQ, "group_size": 0}, "group_size 0; supported are a positive number, or -1"),
        (gptq(bits=3), "3 bits; supported are 4, 8 bits"),
        (gptq(bits=None), "None bits"),
        (gptq(checkpoint_format="marlin"), "format 'marlin'; supported are gptq, gptq_v2"),
        (gptq(pack_dtype="int16"), "words of int16"),
        (gptq(dynamic={"+:.*down.*": {"bits": 8}}), r"some layers \(dynamic\)"),
        (compressed("nvfp4-pack-quantized", 8, "tensor_group"),
         r"8 bits \(float, nvfp4-pack-quantized\); supported is float of 4 bits"),
        (compressed("nvfp4-pack-quantized", 4, "tensor_group", group_size=32),
         "group_size 32; supported is 16"),
        (compressed("mxfp4-pack-quantized", 4, "group", group_size=16),
         "group_size 16; supported is 32"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"},
         "quant_algo MIXED_PRECISION; supported are NVFP4, W4A16_NVFP4, FP8"),
        ({**MODELOPT, "quant_algo": None}, "quant_algo NONE; supported are NVFP4"),
        ({**MODELOPT, "group_size": 128}, "group_size 128; supported is 16"),
        ({**MODELOPT, "quantization": "NVFP4"}, "config.json is wrong"),
        (compressed("pack-quantized", 3, "group", group_size=128), r"3 bits \(int, pack-quant"),
        (compressed("pack-quantized", 4, "group", group_size="x"), "group_size 'x'"),
        (compressed("float-quantized", 8, "attn_head"), "scales of each attn_head"),
        ({**compressed("int-quantized", 8, "channel"), "config_groups": {}}, "no group of weights"),
        ({**compressed("int-quantized", 8, "channel"), "sparsity_config":
          {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({**compressed("int-quantized", 8, "channel"), "transform_config":
          {"config_groups": {"R1": {}}}}, "transformed weights"),
        ({**compressed("int-quantized", 8, "channel"), "config_groups": ["weights"]},
         "config.json is wrong"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_from_the_configuration_alone(
    config: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        _described(tmp_path, DEMO, config)


DEMO = ASSETS / "demo-small"


def _described(place: Path, model: Path, quantization: Any) -> ModelDescription:
    raw = json.loads((model / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    return describe_model(place)


@pytest.mark.parametrize("method", ["fp8", "awq", None])
def test_stacked_experts_are_floats_or_mxfp4(method: str | None, tmp_path: Path) -> None:
    directory = _write(tmp_path, "mxfp4")
    with pytest.raises(ModelError, match=rf"quantised \({method}\); only float and MXFP4"):
        _described(tmp_path, directory, {"quant_method": method})


def test_layers_of_different_formats_are_refused(tmp_path: Path) -> None:
    config = compressed("pack-quantized", 4, "group", group_size=128)
    other = compressed("pack-quantized", 8, "group", group_size=128)["config_groups"]["group_0"]
    activations = {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}}
    config["config_groups"]["group_1"] = activations
    assert _described(tmp_path, DEMO, config).config.quantized is not None
    config["config_groups"]["group_1"] = other
    with pytest.raises(ModelError, match="groups of weights that differ; supported is one group"):
        _described(tmp_path, DEMO, config)


@pytest.mark.parametrize("kind", ["packed", "fp8 rows", "int8"])
def test_a_quantised_head_beside_tied_embeddings_is_used(tmp_path: Path, kind: str) -> None:
    """It cannot be equal to the embeddings, which are floats."""
    checkpoint = write_quantized(tmp_path, "llama", kind, with_head=True)
    file = checkpoint.directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    assert_logits_are_transformers(checkpoint)
    (remark,) = describe_model(checkpoint.directory).remarks
    assert "lm_head.weight that differs" in remark


def test_a_damaged_scale_of_a_gguf_block_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", small_model(), kind=Type.Q4_1)
    described = describe_model(file)
    name = "model.layers.0.mlp.down_proj.weight"
    raw = bytearray(file.read_bytes())
    begin = described.tensors[name].begin
    raw[begin + 2 : begin + 4] = np.float16(np.nan).tobytes()
    file.write_bytes(raw)
    with pytest.raises(ModelError, match=f"{name} in .* is damaged: its scales hold NaN"):
        load_model(described, torch.bfloat16, CPU, quantization="packed")
