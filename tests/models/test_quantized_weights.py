"""Quantised checkpoints stand for the same floats and take the bytes that are counted: widened,
kept as a GPU or a CPU keeps them, whole, and divided among ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.kernels.cpu.narrow_linear import packed_linear
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.packed_sizes import Keeper
from disagg.models import weights
from disagg.models.checkpoint import StoredTensor, read_header
from disagg.models.description import describe_model
from disagg.models.gguf_model import GgufStored
from disagg.models.gguf_values import read_values
from disagg.models.packing import DeviceFormat, packing_of, weights_nbytes
from disagg.models.parts import Part
from disagg.models.quantized import QuantizedFormat, QuantizedStored, as_floats
from disagg.models.quantized_values import Quantized, quantized
from disagg.models.share import WHOLE, Share
from disagg.models.weights import load_weights
from tests.models.gguf_files import write_gguf
from tests.models.quantized_files import (
    GPT_OSS,
    OF_ANY_FAMILY,
    all_tensors,
    nbytes_of,
    write_quantized,
)
from tests.models.test_gguf import small_model
from tests.models.test_ranks import eight_heads

CPU = torch.device("cpu")
PAIR = (WHOLE, Share(0, 2), Share(1, 2))
WHOLE_EXPERTS = (Share(0, 2, True), Share(1, 2, True))
MATRICES = ("qkv", "output", "gate_up", "down")


def _check(
    model: Path, floats: Path, share: Share, keeper: Keeper | None, dtype: torch.dtype
) -> dict[str, Any]:
    """What a rank loads of `model`, which stands for the floats that it loads of another one."""
    so_far: list[tuple[int, int]] = []
    found = all_tensors(
        model, share, dtype=dtype, keeps_packed=keeper, progress=lambda *each: so_far.append(each)
    )
    wanted = all_tensors(floats, share, dtype=dtype)
    assert found.keys() == wanted.keys()
    for name, its in wanted.items():
        own = found[name]
        own = own.widened(dtype) if isinstance(own, PackedMatrix) else own
        assert torch.equal(own, its), (name, share)
    described = describe_model(model)
    format = DeviceFormat(dtype.itemsize, keeper or "gpu", described.tensors if keeper else None)
    held = {
        name: packed_linear(each, None, dtype)
        if keeper == "cpu" and isinstance(each, PackedMatrix)
        else each
        for name, each in found.items()
    }
    if found["lm_head"] is found["embedding"]:
        held["lm_head"] = held["embedding"]
    counted = weights_nbytes(described.config, format, share)
    assert nbytes_of(held) == counted and so_far[-1] == (counted, counted)
    return found


def _packed(found: dict[str, Any]) -> set[str]:
    return {name for name, each in found.items() if isinstance(each, PackedMatrix)}


# Of these kinds a CPU keeps the matrices.
ON_CPUS = ["packed", "packed with zeros", "packed 8 bits", "int8", "awq", "gptq", "gptq v2"]
ON_CPUS += ["gptq uneven groups", "gptq groups of 48", "gptq rows in order of activations"]


@pytest.mark.parametrize("kind", OF_ANY_FAMILY)
def test_every_value_is_the_one_it_stands_for(kind: str, tmp_path: Path) -> None:
    """Also those of ranks, which begin inside words, groups and blocks."""
    model = write_quantized(tmp_path, "llama", kind, **eight_heads("llama")).directory
    floats, config = tmp_path / "floats", describe_model(model).config
    for share in (WHOLE, Share(1, 2), Share(1, 4), Share(3, 4)):
        _check(model, floats, share, None, torch.float32)
    _check(model, floats, Share(3, 4), None, torch.bfloat16)
    # Of `down`, a rank of two has 40 columns: groups of 16 are cut in two, and both ranks widen it,
    # so that they plan alike. In an order of activations, so is `output`, of which they have 64.
    assert config.quantized is not None
    cut = 1 + ("order" in kind) if config.quantized.num_columns else 0
    for share in PAIR:
        kept = _packed(_check(model, floats, share, "gpu", torch.float32))
        assert len(kept) == (4 - (0 if share == WHOLE else cut)) * config.num_layers
    kept = _packed(_check(model, floats, WHOLE, "cpu", torch.float32))
    assert len(kept) == (4 * config.num_layers if kind in ON_CPUS else 0)


@dataclass(frozen=True)
class Kept:
    """A checkpoint of which a GPU keeps the fields `packed` of layer 1, and widens `wide`."""

    variant: str
    kind: str
    packed: tuple[str, ...]
    wide: tuple[str, ...] = ()
    shares: tuple[Share, ...] = PAIR
    changes: dict[str, Any] = field(default_factory=dict)


OF_EXPERTS = ("gate_up", "down", "shared_gate_up", "shared_down")
SMALL_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
# Their groups would be cut if ranks had a part of every expert.
ODD_EXPERTS = {**SMALL_EXPERTS, "moe_intermediate_size": 96}
ORDER = "gptq in order of activations"
KEPT = {
    **{
        f"experts, {kind}": Kept("qwen2-moe", kind, OF_EXPERTS, changes=SMALL_EXPERTS)
        for kind in ("fp8 blocks", "int8 with zeros", "packed with zeros", "awq", "nvfp4")
    },
    # All experts of a layer are one matrix.
    "experts in orders of their own": Kept(
        "qwen2-moe", ORDER, ("shared_gate_up",), ("gate_up", "down"), (WHOLE,), SMALL_EXPERTS
    ),
    "whole experts in orders of their own": Kept(
        "qwen3-moe", ORDER, ("qkv",), ("gate_up", "down"), WHOLE_EXPERTS, ODD_EXPERTS
    ),
    **{
        f"whole experts, {kind}": Kept(variant, kind, OF_EXPERTS[:2], (), WHOLE_EXPERTS, sizes)
        for variant, kind, sizes in (
            ("qwen3-moe-dense-first", "fp8 blocks", ODD_EXPERTS),
            ("qwen2-moe", "packed with zeros", ODD_EXPERTS),
            ("mixtral", "awq", {"intermediate_size": 96}),
            ("deepseek-v3", "int8", ODD_EXPERTS),
            ("mixtral", "nvfp4 of modelopt", {"intermediate_size": 96}),
        )
    },
    # 48 columns each, of groups of 32: 16 columns share a scale then.
    "groups that ranks cut": Kept(
        "llama", "gptq uneven groups", MATRICES, changes={"intermediate_size": 96}
    ),
    "groups of powers of two that ranks cut": Kept(
        "llama", "mxfp4 packed", MATRICES, changes={"intermediate_size": 96}
    ),
    "mxfp4": Kept(
        "gpt-oss", "mxfp4", ("gate_up", "down"), ("qkv",), (*PAIR, *WHOLE_EXPERTS), GPT_OSS
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_a_gpu_keeps_of_a_layer(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all matrices are kept, there never is a wide one."""
    kept = KEPT[case]
    if kept.packed == OF_EXPERTS:
        monkeypatch.setattr(Quantized, "widened", lambda *_: pytest.fail("a matrix was widened"))
    changes = {**eight_heads(kept.variant), **kept.changes}
    model = write_quantized(tmp_path, kept.variant, kept.kind, **changes).directory
    for share in kept.shares:
        # Ranks divide MXFP4 by groups, and floats evenly.
        is_other = kept.kind == "mxfp4" and share != WHOLE
        floats = model if is_other else tmp_path / "floats"
        found = _check(model, floats, share, "gpu", torch.float32)
        own = {name.removeprefix("1.") for name in _packed(found) if name.startswith("1.")}
        assert own >= {*kept.packed} and not own & {*kept.wide}
        if "that ranks cut" in case and share != WHOLE:
            assert found["1.down"].group == 16


@pytest.mark.parametrize("kind", ["fp8 blocks", "packed with zeros", "gptq", "nvfp4"])
def test_a_head_keeps_its_bits(kind: str, tmp_path: Path) -> None:
    """Also the part of a rank, whose rows begin inside a block of scales."""
    model = write_quantized(tmp_path, "llama", kind, with_head=True).directory
    for share in PAIR:
        assert "lm_head" in _packed(_check(model, tmp_path / "floats", share, "gpu", torch.float32))


def test_matrices_in_different_orders_are_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which config.json does not say: so are parts of columns in an order that it denies."""
    directory = write_quantized(tmp_path, "llama", ORDER).directory
    found = all_tensors(directory, keeps_packed="gpu")
    assert isinstance(found["0.down"], PackedMatrix) and found["0.down"].order is not None
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, directory / "model.safetensors")
    found = all_tensors(directory, keeps_packed="gpu")
    assert isinstance(found["0.gate_up"], PackedMatrix)
    assert isinstance(found["1.gate_up"], Tensor)
    assert "up_proj.weight: converted to floats" in caplog.text


@pytest.mark.parametrize(
    "kind", ["fp8 blocks", "packed with zeros", "int8", "awq", "gptq", "nvfp4 of modelopt"]
)
def test_a_rank_reads_only_its_part(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**eight_heads("llama"), "intermediate_size": 128}
    directory = write_quantized(tmp_path, "llama", kind, **sizes).directory
    read, nbytes = weights.WeightReader._read, list[int]()

    def counted(reader: Any, name: str, stored: StoredTensor, box: Sequence[Any]) -> Tensor:
        found = read(reader, name, stored, box)
        if "_proj." in name:
            nbytes.append(found.nbytes)
        return found

    monkeypatch.setattr(weights.WeightReader, "_read", counted)
    sums = []
    for share in (WHOLE, *(Share(rank, 4) for rank in range(4))):
        nbytes.clear()
        list(load_weights(describe_model(directory), torch.float32, CPU, share=share).layers)
        sums.append(sum(nbytes))
    # One KV head of two, whole words and groups, and which group each column is of.
    assert max(sums[1:]) < 0.4 * sums[0]


BLOCKS = [Type.Q4_0, Type.Q4_1, Type.Q8_0]
OTHERS = [Type.Q5_0, Type.Q5_1, Type.Q5_K]  # which are always widened
NUMBERS = {
    Type.Q4_0: range(-8, 8),
    Type.Q4_1: range(-8, 8),
    Type.Q8_0: range(-128, 128),
    Type.Q4_K: range(-8, 8),
    Type.Q6_K: range(-32, 32),
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_of_gguf_on_a_cpu(tied: bool, kind: Type, tmp_path: Path) -> None:
    """All values, of queries and keys in transformers' order; also the tables, and ranks."""
    model = small_model(num_hidden_layers=2, tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    for share in PAIR:
        found = _check(file, file, share, "cpu", torch.float32)
        layers = {f"{layer}.{name}" for layer in range(2) for name in MATRICES}
        assert _packed(found) == {"embedding", "lm_head", *layers}
        assert (found["lm_head"] is found["embedding"]) == tied


@pytest.mark.parametrize("kind", [*BLOCKS, *OTHERS, Type.Q4_K, Type.Q6_K])
def test_every_number_of_a_block(kind: Type, tmp_path: Path) -> None:
    """Random bytes, which the library widens, with a scale and a least value that are numbers."""
    rng = np.random.default_rng(int(kind))
    num_values, nbytes = GGML_QUANT_SIZES[kind]
    num_rows, num_blocks = 70, 3
    raw = rng.integers(0, 256, (num_rows, num_blocks, nbytes), dtype=np.uint8)
    halves = rng.uniform(0.01, 0.02, (num_rows, num_blocks, 2)).astype(np.float16)
    if kind == Type.Q6_K:
        raw[:, :, 208:] = halves[:, :, :1].view(np.uint8)
    else:
        count = 1 if kind in (Type.Q4_0, Type.Q5_0, Type.Q8_0) else 2
        raw[:, :, : 2 * count] = halves[:, :, :count].view(np.uint8)
    file = tmp_path / "blocks"
    file.write_bytes(b"before" + raw.tobytes())
    shape = num_rows, num_blocks * num_values
    stored = GgufStored(file, kind.name, shape, 6, 6 + raw.nbytes)
    whole, half = torch.from_numpy(dequantize(raw, kind)).view(shape), shape[1] // 2
    numbers: Counter[int] = Counter()
    some, every = (10, 30), ((0, num_rows), (0, shape[1]))
    boxes = [(some, (0, shape[1])), (some, (0, half)), (some, (half, shape[1])), every]
    for box in boxes:  # half is inside a block
        (first, end), columns = box
        wanted, read = whole[first:end, slice(*columns)], read_values(stored, box)
        assert isinstance(read, Quantized) and read.shape == tuple(wanted.shape)
        assert torch.equal(read.widened(torch.float32), wanted)
        part = Part("w", tuple(wanted.shape), shape, box)
        packing = packing_of({"w": stored}, [part], "cpu")
        assert (packing is None) == (kind in OTHERS)
        if packing is not None:
            matrix = read.packed(packing)
            assert matrix is not None and torch.equal(matrix.widened(torch.float32), wanted)
            numbers.update(matrix.numbers().flatten().tolist())
    assert numbers.keys() == {*NUMBERS.get(kind, ())}


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

    def read(role: str, box: Sequence[tuple[int, int]] = ()) -> Tensor:
        return pieces[format.pieces[role].end][tuple(slice(*own) for own in box)]

    found = quantized(matrix, read).widened(torch.bfloat16)
    assert found[[0, 8]].tolist() == [FIRST_ROW, LAST_ROW]
    part = quantized(matrix, read, ((8, 9), (3, 14))).widened(torch.bfloat16)
    assert part.tolist() == [LAST_ROW[3:14]]


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
