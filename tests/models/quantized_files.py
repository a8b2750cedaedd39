"""Quantised checkpoints as other programs write them, each number packed by itself in numpy.

Written from the formats' own descriptions: compressed-tensors (`pack_to_int32`), AutoAWQ
(`WQLinear_GEMM.from_linear`), GPTQModel (`pack`, `convert_gptq_v2_to_v1_format_module`), MXFP4 (OCP
Microscaling Formats, section 5.3.3) and NVFP4 (`NVFP4PackedCompressor` of compressed-tensors, and
ModelOpt's names as vLLM's `modelopt.py` reads them). Beside each there is a checkpoint of the
floats that it stands for.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.kernels.cpu.narrow_linear import NarrowLinear
from disagg.models.description import describe_model
from disagg.models.share import WHOLE, Share
from disagg.models.weights import Progress, load_weights
from tests.models.checkpoints import (
    VARIANTS,
    Checkpoint,
    Files,
    files_in,
    write_checkpoint,
    write_files,
)

_MATRIX = r".*(_proj|_proj_with_mqa|experts\.\d+\.w[123])\.weight"
Pieces = dict[str, Tensor]
Shape = tuple[int, ...]
Quantize = Callable[[Shape, np.random.Generator], tuple[Pieces, Tensor]]
_made: dict[str, tuple[Files, Files]] = {}  # floats and quantised, by all that decides them


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        config: of config.json.
        quantize: draws numbers for a matrix of a shape; its pieces, and the floats they stand for.
        matrices: the pattern of their names.
    """

    config: Mapping[str, Any]
    quantize: Quantize
    matrices: str = _MATRIX


def write_quantized(
    directory: Path, variant: str, kind: str, *, with_head: bool = False, **changes: Any
) -> Checkpoint:
    """Write `directory`/quantised and `directory`/floats; the model is that of the floats.

    Args:
        with_head: the matrix that makes logits is quantised, too.
        changes: of its configuration.
    """
    floats, quantized = directory / "floats", directory / "quantised"
    key = json.dumps([variant, kind, with_head, changes], sort_keys=True)
    if key not in _made:
        with tempfile.TemporaryDirectory() as scratch:
            places = Path(scratch) / "floats", Path(scratch) / "quantised"
            for place in places:
                write_checkpoint(place, variant, **changes)
            _quantize(*places, kind, with_head)
            _made[key] = files_in(places[0]), files_in(places[1])
    for place, files in zip((floats, quantized), _made[key], strict=True):
        write_files(place, files)
    family = getattr(transformers, f"{VARIANTS[variant][0]}ForCausalLM")
    return Checkpoint(quantized, lambda: family.from_pretrained(floats).eval())


def all_tensors(
    directory: Path,
    share: Share = WHOLE,
    *,
    dtype: torch.dtype = torch.float32,
    keeps_packed: Literal["gpu", "cpu"] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What a rank loads of a model, by name; of layers, with their number."""
    model, cpu = describe_model(directory), torch.device("cpu")
    weights = load_weights(model, dtype, cpu, progress, share, keeps_packed=keeps_packed)
    found: dict[str, Any] = {
        name: getattr(weights, name) for name in ("embedding", "norm", "lm_head")
    }
    for index, layer in enumerate(weights.layers):
        own = {each.name: getattr(layer, each.name) for each in fields(layer)}
        found |= {f"{index}.{name}": each for name, each in own.items() if each is not None}
    return found


def nbytes_of(tensors: Mapping[str, Any]) -> int:
    """Bytes of what a rank has loaded, or packed for a CPU; tied tables are one."""

    def nbytes(each: Any) -> int:
        is_narrow = isinstance(each, NarrowLinear)
        return int(each.numbers.nbytes + each.scales.nbytes if is_narrow else each.nbytes)

    return sum({id(each): nbytes(each) for each in tensors.values()}.values())


def _quantize(floats: Path, quantized: Path, kind: str, with_head: bool) -> None:
    """Makes one of two equal checkpoints quantised, and the other one what it stands for."""
    tensors, wide = load_file(floats / "model.safetensors"), {}
    rng, stored = np.random.default_rng(7), {}
    for name, tensor in sorted(tensors.items()):
        is_head = with_head and name == "lm_head.weight"
        if not re.fullmatch(KINDS[kind].matrices, name) and not is_head:
            wide[name] = stored[name] = tensor
            continue
        pieces, wide[name] = KINDS[kind].quantize(tuple(tensor.shape), rng)
        module = f"{name.removesuffix('.weight')}." if name.endswith(".weight") else f"{name}_"
        stored |= {f"{module}{end}": piece for end, piece in pieces.items()}
    save_file(wide, floats / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors")
    raw = json.loads((quantized / "config.json").read_text())
    raw["quantization_config"] = KINDS[kind].config
    (quantized / "config.json").write_text(json.dumps(raw))


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 [rows, columns / numbers in a word] of uint [rows, columns].

    Args:
        order: which of its columns comes next, from the lowest bits of a word on.
    """
    in_a_word = 32 // bits
    order = order or tuple(range(in_a_word))
    rows, columns = numbers.shape
    padded = np.zeros((rows, -(-columns // in_a_word) * in_a_word), dtype=np.uint32)
    padded[:, :columns] = numbers
    packed = np.zeros((rows, padded.shape[1] // in_a_word), dtype=np.uint32)
    for place, column in enumerate(order):
        packed |= padded[:, column::in_a_word] << np.uint32(bits * place)
    return packed.view(np.int32)


def _fp8_numbers(shape: Shape, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """All numbers but NaN, and what they are: sign, exponent of 7 less, three bits (OCP)."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 127) == 127] = 0
    exponents, digits = (codes.astype(np.int64) >> 3) & 15, codes & 7
    sizes = np.where(
        exponents == 0, digits / 8 * 2.0**-6, (1 + digits / 8) * 2.0 ** (exponents - 7.0)
    )
    values = np.where(codes > 127, -sizes, sizes)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(values).float()


def _scales(shape: Shape, size: float, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.uniform(0.5, 1.5, shape) * size).float()


def _fp8(
    shape: Shape,
    rng: np.random.Generator,
    *,
    rows: int | None,
    columns: int | None = None,
    end: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
) -> tuple[Pieces, Tensor]:
    """Rows and columns that share a scale; None: all."""
    numbers, values = _fp8_numbers(shape, rng)
    per = rows or shape[0], columns or shape[1]
    scales = _scales((-(-shape[0] // per[0]), -(-shape[1] // per[1])), 1e-3, rng).to(dtype)
    of_each = np.kron(scales.float().numpy(), np.ones(per, np.float32))
    wide = values * torch.from_numpy(of_each[: shape[0], : shape[1]])
    stored = scales.reshape(()) if rows is None else scales
    return {"weight": numbers, end: stored, "input_scale": torch.tensor(1.0)}, wide


def _int8(
    shape: Shape, rng: np.random.Generator, *, is_symmetric: bool = True
) -> tuple[Pieces, Tensor]:
    numbers = torch.from_numpy(rng.integers(-128, 128, shape, dtype=np.int8))
    scales = _scales((shape[0], 1), 1e-3, rng).to(torch.bfloat16)
    zeros = torch.from_numpy(rng.integers(-128, 128, (shape[0], 1), dtype=np.int8))
    pieces = {"weight": numbers, "weight_scale": scales}
    if is_symmetric:
        return pieces, numbers.float() * scales.float()
    wide = (numbers.float() - zeros.float()) * scales.float()
    return {**pieces, "weight_zero_point": zeros}, wide


def _shuffled(owner: np.ndarray) -> np.ndarray:
    """The same way for all matrices of one input, since it is their activations that order it."""
    return np.random.default_rng(len(owner)).permutation(owner)


def _packed(
    shape: Shape,
    rng: np.random.Generator,
    *,
    bits: int = 4,
    group: int | None = 16,
    is_symmetric: bool = True,
    is_ordered: bool = False,
) -> tuple[Pieces, Tensor]:
    """compressed-tensors."""
    (num_out, num_in), half = shape, 1 << (bits - 1)
    numbers = rng.integers(0, 2 * half, shape)
    num_groups = 1 if group is None else num_in // group
    scales = _scales((num_out, num_groups), 0.1 / half, rng).to(torch.bfloat16)
    zeros = rng.integers(0, 2 * half, (num_out, num_groups))
    if is_symmetric:
        zeros[:] = half
    owner = np.arange(num_in) // (num_in // num_groups)
    if is_ordered:
        owner = _shuffled(owner)
    less = torch.from_numpy((numbers - half) - (zeros - half)[:, owner]).float()
    pieces = {
        "weight_packed": torch.from_numpy(words(numbers, bits)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    if not is_symmetric:  # packed from the top down
        packed = np.ascontiguousarray(words(zeros.T, bits).T)
        pieces["weight_zero_point"] = torch.from_numpy(packed)
    if is_ordered:
        pieces["weight_g_idx"] = torch.from_numpy(owner.astype(np.int32))
    return pieces, less * scales.float()[:, owner]


def _awq(shape: Shape, rng: np.random.Generator) -> tuple[Pieces, Tensor]:
    (num_out, num_in), group = shape, AWQ["group_size"]
    numbers = rng.integers(0, 16, (num_in, num_out))
    zeros = rng.integers(0, 16, (num_in // group, num_out))
    scales = _scales(zeros.shape, 0.01, rng).half()
    owner = np.arange(num_in) // group
    wide = torch.from_numpy(numbers - zeros[owner]).float() * scales.float()[owner]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    pieces = {
        "qweight": torch.from_numpy(words(numbers, 4, order)),
        "qzeros": torch.from_numpy(words(zeros, 4, order)),
        "scales": scales,
    }
    return pieces, wide.T.contiguous()


def _gptq(
    shape: Shape,
    rng: np.random.Generator,
    *,
    bits: int = 4,
    group: int | None = 16,
    version: int = 1,
    is_ordered: bool = False,
) -> tuple[Pieces, Tensor]:
    num_out, num_in = shape
    size = group or num_in
    numbers = rng.integers(0, 1 << bits, (num_in, num_out))
    zeros = rng.integers(0, 1 << bits, (-(-num_in // size), num_out))
    scales = _scales(zeros.shape, 0.2 / (1 << bits), rng).half()
    owner = np.arange(num_in) // size
    if is_ordered:
        owner = _shuffled(owner)
    wide = torch.from_numpy(numbers - zeros[owner]).float() * scales.float()[owner]
    packed_zeros = words(zeros, bits)
    if version == 1:
        ones = {4: 0x11111111, 8: 0x01010101}[bits]
        packed_zeros = (packed_zeros.view(np.uint32) - np.uint32(ones)).view(np.int32)
    pieces = {
        "qweight": torch.from_numpy(np.ascontiguousarray(words(numbers.T, bits).T)),
        "qzeros": torch.from_numpy(packed_zeros),
        "scales": scales,
        "g_idx": torch.from_numpy(owner.astype(np.int32)),
    }
    return pieces, wide.T.contiguous()


def _e2m1_numbers(shape: Shape, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Bytes with two numbers each, the first one in the lower half, and what the numbers are."""
    bits = torch.from_numpy(rng.integers(0, 16, shape))
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    pairs = bits[..., 0::2] | bits[..., 1::2] << 4
    return pairs.to(torch.uint8), torch.cat((e2m1, -e2m1))[bits]


def _mxfp4(shape: Shape, rng: np.random.Generator) -> tuple[Pieces, Tensor]:
    """All experts of a layer, of which the floats are [in, out] and the numbers [out, in]."""
    count, size, num_rows = shape
    pairs, values = _e2m1_numbers((count, num_rows, size // 32, 32), rng)
    scales = torch.from_numpy(rng.integers(121, 125, (count, num_rows, size // 32)))
    wide = values * 2.0 ** (scales[..., None] - 127)
    pieces = {"blocks": pairs, "scales": scales.to(torch.uint8)}
    return pieces, wide.flatten(2).transpose(1, 2).contiguous()


def _mxfp4_packed(shape: Shape, rng: np.random.Generator) -> tuple[Pieces, Tensor]:
    pairs, values = _e2m1_numbers(shape, rng)
    scales = torch.from_numpy(rng.integers(121, 125, (shape[0], -(-shape[1] // 32))))
    wide = values * (2.0 ** (scales - 127)).repeat_interleave(32, 1)[:, : shape[1]]
    return {"weight_packed": pairs, "weight_scale": scales.to(torch.uint8)}, wide


def _nvfp4(shape: Shape, rng: np.random.Generator, *, divides: bool) -> tuple[Pieces, Tensor]:
    """Each matrix with a global scale of its own, also those that are one product."""
    pairs, values = _e2m1_numbers(shape, rng)
    scales, of_each = _fp8_numbers((shape[0], -(-shape[1] // 16)), rng)
    scales = (scales.view(torch.uint8) & 127).view(torch.float8_e4m3fn)  # as they are: positive
    all_of_it = np.float32(rng.uniform(0.5, 1.5) * 1e-3)
    stored = np.float32(1) / all_of_it if divides else all_of_it
    multiplied = np.float32(1) / stored if divides else stored
    of_columns = of_each.abs().repeat_interleave(16, 1)[:, : shape[1]].double()
    wide = (values.double() * of_columns * float(multiplied)).float()
    global_scale = torch.tensor(stored).reshape((1,) if divides else ())
    if divides:
        names = ("weight_packed", "weight_global_scale", "input_global_scale")
    else:
        names = ("weight", "weight_scale_2", "input_scale")
    pieces = dict(zip(names, (pairs, global_scale, torch.tensor(3.0)), strict=True))
    return {**pieces, "weight_scale": scales}, wide


def compressed(format: str, num_bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    kind = "float" if format.startswith(("float", "nvfp4", "mxfp4")) else "int"
    said = {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, **more}


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 16,
    "zero_point": True,
    "version": "gemm",
}
ASYMMETRIC, BLOCK = {"symmetric": False}, [32, 16]
_ROWS: dict[str, Any] = {"rows": 1}
_ALL: dict[str, Any] = {"rows": None}
_BLOCKS: dict[str, Any] = {"rows": 32, "columns": 16}
KINDS: dict[str, Kind] = {
    "fp8 blocks": Kind(
        {**FP8, "weight_block_size": BLOCK}, partial(_fp8, **_BLOCKS, end="weight_scale_inv")
    ),
    "fp8 rows": Kind(FP8, partial(_fp8, **_ROWS)),
    "fp8 tensor": Kind({**FP8, "activation_scheme": "static"}, partial(_fp8, **_ALL)),
    "float rows": Kind(
        compressed("float-quantized", 8, "channel"), partial(_fp8, **_ROWS, dtype=torch.bfloat16)
    ),
    "float tensor": Kind(compressed("float-quantized", 8, "tensor"), partial(_fp8, **_ALL)),
    "float blocks": Kind(
        compressed("float-quantized", 8, "block", block_structure=BLOCK), partial(_fp8, **_BLOCKS)
    ),
    "int8": Kind(compressed("int-quantized", 8, "channel"), _int8),
    "int8 with zeros": Kind(
        compressed("int-quantized", 8, "channel", **ASYMMETRIC), partial(_int8, is_symmetric=False)
    ),
    "packed": Kind(compressed("pack-quantized", 4, "group", group_size=16), _packed),
    "packed with zeros": Kind(
        compressed("pack-quantized", 4, "group", group_size=16, **ASYMMETRIC),
        partial(_packed, is_symmetric=False),
    ),
    "packed in order of activations": Kind(
        compressed("pack-quantized", 4, "group", group_size=16, actorder="group"),
        partial(_packed, is_ordered=True),
    ),
    "packed 8 bits": Kind(
        compressed("pack-quantized", 8, "channel"), partial(_packed, bits=8, group=None)
    ),
    "awq": Kind(AWQ, _awq),
    "gptq": Kind(gptq(), _gptq),
    "gptq v2": Kind(gptq(checkpoint_format="gptq_v2"), partial(_gptq, version=2)),
    "gptq 8 bits": Kind(gptq(bits=8, group_size=-1), partial(_gptq, bits=8, group=None)),
    "gptq uneven groups": Kind(gptq(group_size=32), partial(_gptq, group=32)),
    "gptq groups of 48": Kind(gptq(group_size=48), partial(_gptq, group=48)),
    "gptq in order of activations": Kind(gptq(desc_act=True), partial(_gptq, is_ordered=True)),
    "gptq rows in order of activations": Kind(
        gptq(desc_act=True, group_size=-1), partial(_gptq, group=None, is_ordered=True)
    ),
    "mxfp4 packed": Kind(
        compressed("mxfp4-pack-quantized", 4, "group", group_size=32), _mxfp4_packed
    ),
    "nvfp4": Kind(
        compressed("nvfp4-pack-quantized", 4, "tensor_group", group_size=16),
        partial(_nvfp4, divides=True),
    ),
    "nvfp4 of modelopt": Kind(MODELOPT, partial(_nvfp4, divides=False)),
    "fp8 of modelopt": Kind({**MODELOPT, "quant_algo": "FP8"}, partial(_fp8, **_ALL)),
    "mxfp4": Kind(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        _mxfp4,
        matrices=r".*experts\.(gate_up|down)_proj",
    ),
}
OF_ANY_FAMILY = [kind for kind in KINDS if kind != "mxfp4"]
# Whose columns are whole groups of MXFP4.
GPT_OSS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
