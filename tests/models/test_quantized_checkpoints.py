"""fp8, compressed-tensors, AWQ and GPTQ: read as the floats they stand for, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.cli.main import main
from disagg.config import ASSETS, EngineConfig, TierConfig
from disagg.engine.device.check import check_engine
from disagg.errors import ModelError
from disagg.kernels.torch.ops import TorchOps
from disagg.models.checkpoint import StoredTensor, read_header
from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.quantized import QuantizedFormat, QuantizedStored, as_floats
from disagg.models.quantized_values import quantized
from disagg.models.share import WHOLE, Share
from disagg.worker.check import check_tier
from tests.models.checkpoints import assert_logits_are_transformers
from tests.models.quantized_files import (
    AWQ,
    FP8,
    KINDS,
    all_tensors,
    compressed,
    gptq,
    write_quantized,
)
from tests.models.test_packed import FakeGpuOps
from tests.models.test_ranks import eight_heads

CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]
ENGINE = EngineConfig(device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20)
DOWN = "model.layers.1.mlp.down_proj"


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_the_one_it_stands_for(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also those of ranks, which begin inside words, groups and blocks."""
    directory = write_quantized(tmp_path, "llama", kind, **eight_heads("llama")).directory
    for share in (WHOLE, Share(1, 2), Share(1, 4), Share(3, 4)):
        found = all_tensors(directory, share, dtype=dtype)
        wanted = all_tensors(tmp_path / "floats", share, dtype=dtype)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), (name, share)


# Each family that may be quantised; `test_popular` writes them into docs/reference/models.md.
OF_FAMILIES = [
    ("qwen3-mixed-windows", "fp8 blocks"),
    ("phi3", "float rows"),
    ("mistral-sliding", "int8"),
    ("llama-tied-biased-llama3", "packed with zeros"),
    ("qwen2", "awq"),
    ("qwen2", "gptq in order of activations"),
    ("qwen3-moe-dense-first", "fp8 tensor"),
    ("qwen2-moe", "gptq 8 bits"),
    ("mixtral", "gptq uneven groups"),
    ("deepseek-v2-groups", "float rows"),
    ("deepseek-v3", "fp8 blocks"),
    ("glm4-moe", "float rows"),
    ("glm4-moe-lite", "int8"),
    ("minimax-m2", "fp8 blocks"),
    ("gemma", "int8"),
    ("gemma2", "awq"),
    ("gemma3", "fp8 blocks"),
    ("olmo2", "float rows"),
    ("olmo3", "packed with zeros"),
]


@pytest.mark.parametrize(("variant", "kind"), OF_FAMILIES)
def test_logits_are_those_of_the_widened_weights(variant: str, kind: str, tmp_path: Path) -> None:
    assert_logits_are_transformers(write_quantized(tmp_path, variant, kind))


def test_numbers_that_compressed_tensors_itself_packed(tmp_path: Path) -> None:
    """Of version 0.20.0: a matrix of 9 rows, whose zero points fill one word and a part of the
    next, and what its `decompress` made of the first row and the last one."""
    pieces = {
        "weight_packed": torch.tensor(PACKED, dtype=torch.int32),
        "weight_scale": torch.tensor(SCALES, dtype=torch.bfloat16),
        "weight_zero_point": torch.tensor(ZEROS, dtype=torch.int32),
        "weight_shape": torch.tensor([9, 16]),
    }
    file = tmp_path / "model.safetensors"
    save_file({f"a.{end}": piece for end, piece in pieces.items()}, file)
    format = QuantizedFormat(name="", layout="packed", bits=4, group_size=8)
    matrix = as_floats(read_header(file).tensors, format)["a.weight"]
    assert isinstance(matrix, QuantizedStored) and matrix.shape == (9, 16)

    def read(end: str, box: Sequence[tuple[int, int]] = ()) -> Tensor:
        return pieces[end][tuple(slice(*own) for own in box)]

    found = quantized(matrix, read).widened(torch.bfloat16)
    assert found[[0, 8]].tolist() == [FIRST_ROW, LAST_ROW]
    part = quantized(matrix, read, ((8, 9), (3, 14))).widened(torch.bfloat16)
    assert part.tolist() == [LAST_ROW[3:14]]


def test_the_memory_is_that_of_the_widened_weights(tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", "awq").directory
    narrow, floats = describe_model(directory), describe_model(tmp_path / "floats")
    assert narrow.num_parameters == floats.num_parameters
    plan, plain = check_engine(ENGINE, narrow), check_engine(ENGINE, floats)
    assert plan is not None and plain is not None
    assert (
        plan.weights_nbytes
        == plain.weights_nbytes
        == weights_nbytes(floats.config, DeviceFormat(4))
    )
    assert plan.shape.layout != plain.shape.layout  # nor is its KV that of other weights


def test_the_start_and_the_plan_say_that_weights_are_widened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_quantized(tmp_path, "llama", "awq").directory
    said: list[str] = []
    for place in (tmp_path / "floats", directory):
        check_tier(TierConfig(model=str(place), engine=ENGINE), tell=said.append)
    (sentence,) = said
    stored = sum(each.end - each.begin for each in _stored(directory))
    wide = weights_nbytes(describe_model(directory).config, DeviceFormat(4))
    assert sentence == (
        "The weights of quantised are converted to float32 when they are loaded; they take"
        f" {wide / 1e6:.1f} MB instead of {stored / 1e6:.1f} MB."
    )
    plan = ["plan", str(directory), "--input-tokens", "64", "--output-tokens", "64"]
    assert main(plan) == 0
    found = capsys.readouterr().out
    assert "quantised (AWQ). GPUs keep them so" in found and "GB in AWQ;" in found
    assert main([*plan, "--weights", "fp8"]) == 0
    found = capsys.readouterr().out
    assert "quantised (AWQ). The plan uses their size in fp8" in found and "GB in fp8;" in found


def _stored(directory: Path) -> list[StoredTensor]:
    return [*read_header(directory / "model.safetensors").tensors.values()]


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
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_starts(
    kind: str, change: Change, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    directory = write_quantized(tmp_path, "llama", kind).directory
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
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(
    kind: str, change: Change, words: str, tmp_path: Path
) -> None:
    """Whether it is widened, or kept as it is."""
    directory = write_quantized(tmp_path, "llama", kind).directory
    model = describe_model(_rewrite(directory, change))
    for ops in (TorchOps(), FakeGpuOps()):
        with pytest.raises(ModelError, match=words):
            load_model(model, torch.float32, CPU, ops=ops)


def test_groups_that_compressed_tensors_left_without_an_order(tmp_path: Path) -> None:
    """It writes -1 where it rounded without calibration."""
    directory = write_quantized(tmp_path, "llama", "packed").directory
    wanted = all_tensors(directory)["1.down"]
    unnamed = {f"{DOWN}.weight_g_idx": torch.full((80,), -1, dtype=torch.int32)}
    _rewrite(directory, lambda it: it.update(unnamed))
    assert torch.equal(all_tensors(directory)["1.down"], wanted)


def test_biases_of_zeros_are_no_biases(tmp_path: Path) -> None:
    """GPTQ gives one to every matrix, of models without any, too."""
    directory = write_quantized(tmp_path, "llama", "gptq").directory
    _rewrite(directory, lambda it: it.update({f"{DOWN}.bias": torch.zeros(48)}))
    load_model(describe_model(directory), torch.float32, CPU)


def test_scales_of_activations_and_of_kv_are_left_alone(tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", "float tensor").directory
    scale, attention = torch.tensor(0.5), "model.layers.0.self_attn"
    more = {f"{attention}.{end}": scale.clone() for end in ("k_scale", "v_proj.v_scale")}
    _rewrite(directory, lambda it: it.update(more))
    load_model(describe_model(directory), torch.float32, CPU)


def test_scales_that_are_powers_of_two_in_a_byte(tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", "fp8 rows").directory
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
         "fp8, compressed-tensors, awq, gptq"),
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
        (compressed("nvfp4-pack-quantized", 4, "tensor_group"), "format nvfp4-pack-quantized;"),
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
    raw = json.loads((ASSETS / "demo-small" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(ModelError, match=words):
        describe_model(tmp_path)


def test_layers_of_different_formats_are_refused(tmp_path: Path) -> None:
    raw = json.loads((ASSETS / "demo-small" / "config.json").read_text())
    config = compressed("pack-quantized", 4, "group", group_size=128)
    other = compressed("pack-quantized", 8, "group", group_size=128)["config_groups"]["group_0"]
    activations = {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}}
    config["config_groups"]["group_1"] = activations
    place = tmp_path / "config.json"
    place.write_text(json.dumps({**raw, "quantization_config": config}))
    assert describe_model(tmp_path).config.quantized is not None
    config["config_groups"]["group_1"] = other
    place.write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(ModelError, match="groups of weights that differ; supported is one group"):
        describe_model(tmp_path)


PACKED = [
    [-1063601674, 45874598],
    [-1388493553, 49570146],
    [616714144, -262355658],
    [1664643315, 410978100],
    [-1067648135, 2063621884],
    [729104632, -199143267],
    [604266262, -2131121847],
    [-510720278, 198333688],
    [1062406940, 386134161],
]
SCALES = [
    [0.2578125, 0.185546875],
    [0.1455078125, 0.11962890625],
    [0.1904296875, 0.236328125],
    [0.220703125, 0.1982421875],
    [0.08544921875, 0.203125],
    [0.2314453125, 0.1875],
    [0.30078125, 0.2392578125],
    [0.1259765625, 0.1806640625],
    [0.2060546875, 0.173828125],
]
ZEROS = [[-699845798, -1737062005], [8, 5]]
FIRST_ROW = [-1.03125, 1.2890625, -0.2578125, 0.2578125, 0.0, -0.2578125, -2.578125, 0.515625]
FIRST_ROW += [-0.9296875, -0.185546875, 0.37109375, 0.7421875, 0.0, 0.0, -1.671875, -2.046875]
LAST_ROW = [0.82421875, -1.4453125, 0.6171875, -1.6484375, -1.03125, -0.6171875, 1.4453125]
LAST_ROW += [-1.03125, -0.6953125, 0.6953125, -0.8671875, 1.734375, -0.34765625, -0.8671875]
LAST_ROW += [0.34765625, -0.6953125]


@pytest.mark.parametrize("kind", ["packed", "fp8 rows", "int8"])
def test_a_quantised_head_beside_tied_embeddings_is_used(tmp_path: Path, kind: str) -> None:
    """It cannot be equal to the embeddings, which are floats."""
    checkpoint = write_quantized(tmp_path, "llama", kind, with_head=True)
    file = checkpoint.directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    assert_logits_are_transformers(checkpoint)
    (remark,) = describe_model(checkpoint.directory).remarks
    assert "lm_head.weight that differs" in remark
