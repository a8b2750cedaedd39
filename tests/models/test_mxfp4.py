"""gpt-oss as its makers store it, with MXFP4 experts: logits are those of the widened weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.errors import ModelError
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.share import WHOLE, Share
from tests.models.checkpoints import Checkpoint, assert_logits_are_transformers
from tests.models.quantized_files import all_tensors, nbytes_of

CPU = torch.device("cpu")
# Of the format: bits of 0 to 15, sign first (OCP Microscaling Formats, section 5.3.3).
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-each for each in E2M1]
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}


def write_mxfp4(directory: Path, intermediate_size: int = 32) -> Checkpoint:
    """transformers computes with the floats; the file has bits and scales in their place."""
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=9,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    )
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM(config).eval()
    packed = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
            if name.endswith(("gate_up_proj", "down_proj")):
                count, size, num_rows = parameter.shape  # they have [in, out]
                bits = torch.randint(0, 16, (count, num_rows, size // 32, 32))
                scales = torch.randint(121, 125, (count, num_rows, size // 32))
                values = torch.tensor(E2M1)[bits] * 2.0 ** (scales[..., None] - 127)
                parameter.copy_(values.flatten(2).transpose(1, 2))
                pairs = bits[..., 0::2] | bits[..., 1::2] << 4  # the first one in the low half
                packed[f"{name}_blocks"] = pairs.to(torch.uint8)
                packed[f"{name}_scales"] = scales.to(torch.uint8)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    plain = {
        name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in packed
    }
    save_file({**plain, **packed}, file)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": QUANTIZATION}))
    return Checkpoint(directory, lambda: model)


def test_logits_are_those_of_the_widened_weights(tmp_path: Path) -> None:
    assert_logits_are_transformers(write_mxfp4(tmp_path))


def test_bytes_are_those_of_the_file_unless_they_are_widened(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    model = describe_model(tmp_path)
    stored = model.stored_nbytes
    assert weights_nbytes(model.config, DeviceFormat(4, kept=model.tensors)) == stored
    widened = weights_nbytes(model.config, DeviceFormat(4, "cpu"))
    assert widened == 4 * model.num_parameters
    assert widened > 1.5 * stored


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_a_gpu_keeps_the_bits_of_its_part(has_whole_experts: bool, tmp_path: Path) -> None:
    write_mxfp4(tmp_path, intermediate_size=96)
    model = describe_model(tmp_path)
    for share in (WHOLE, *(Share(rank, 2, has_whole_experts) for rank in range(2))):
        packed = all_tensors(tmp_path, share, keeps_packed="gpu")
        for name, wanted in all_tensors(tmp_path, share).items():
            is_packed = isinstance(packed[name], PackedMatrix)
            assert is_packed == name.endswith((".gate_up", ".down"))
            assert not is_packed or torch.equal(packed[name].widened(torch.float32), wanted)
        format = DeviceFormat(4, kept=model.tensors)
        assert nbytes_of(packed) == weights_nbytes(model.config, format, share)


def _change(directory: Path, name: str, tensor: Tensor) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(tmp_path / "model.safetensors")[name]
    scales[2, 5, 0] = 255
    _change(tmp_path, name, scales)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj in .* holds NaN"):
        load_model(describe_model(tmp_path), torch.float32, CPU)


def test_blocks_of_another_type_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    _change(tmp_path, name, load_file(tmp_path / "model.safetensors")[name].float())
    with pytest.raises(ModelError, match=f"{name} in .* is F32, but must be U8"):
        load_model(describe_model(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize("method", ["fp8", "awq", None])
def test_another_quantization_is_refused_by_name(method: str | None, tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=rf"quantised \({method}\); only float and MXFP4"):
        describe_model(tmp_path)
