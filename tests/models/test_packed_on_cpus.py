"""Quantised checkpoints that stay quantised on a CPU, as `quantization` "packed" asks for: the same
floats, the same logits, bytes as counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Type

from disagg.config import EngineConfig
from disagg.engine.device.check import check_engine
from disagg.engine.device.choices import check_quantization
from disagg.errors import ModelError, StartupError
from disagg.kernels.cpu.narrow_linear import NarrowLinear
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.gguf_model import GgufStored
from disagg.models.gguf_values import read_values
from disagg.models.packing import DeviceFormat, packing_of, weights_nbytes
from disagg.models.parts import Part
from disagg.models.quantized_values import Quantized
from disagg.models.weights import load_weights
from disagg.worker.check import loading_sentence
from tests.models.checkpoints import write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.paging import logits_of
from tests.models.quantized_files import write_quantized
from tests.models.test_gguf import small_model

CPU = torch.device("cpu")
PACKED = EngineConfig(quantization="packed", device="cpu", dtype="bfloat16")
BLOCKS = [Type.Q4_0, Type.Q4_1, Type.Q8_0]
OTHERS = [Type.Q5_0, Type.Q5_1, Type.Q5_K]  # which are always widened
NUMBERS = {
    Type.Q4_0: range(-8, 8),
    Type.Q4_1: range(-8, 8),
    Type.Q8_0: range(-128, 128),
    Type.Q4_K: range(-8, 8),
    Type.Q6_K: range(-32, 32),
}
MATRICES = ("qkv", "output", "gate_up", "down")


def _check_decoder(model: ModelDescription) -> Decoder:
    """Its logits are those of the widened weights, and its bytes those that are counted."""
    nbytes: list[tuple[int, int]] = []
    packed = load_model(
        model,
        torch.float32,
        CPU,
        lambda *so_far: nbytes.append(so_far),
        quantization="packed",
    )
    assert nbytes[-1][0] == nbytes[-1][1]
    found, wanted = (logits_of(each) for each in (packed, load_model(model, torch.float32, CPU)))
    assert wanted.abs().max() > 0.05
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    kept = weights_nbytes(model.config, DeviceFormat(4, "cpu", model.tensors))
    assert _nbytes(packed, model) == kept == nbytes[-1][1]
    return packed


def _nbytes(decoder: Decoder, model: ModelDescription) -> int:
    """Of what a decoder keeps packed, and of all else as it was loaded."""
    linears: dict[int, NarrowLinear] = {}

    def look(each: Any) -> None:
        if isinstance(each, NarrowLinear):
            linears[id(each)] = each
        elif isinstance(each, list | tuple):
            for one in each:
                look(one)
        elif hasattr(each, "__dataclass_fields__"):
            look([getattr(each, field.name) for field in fields(each)])

    look([decoder._embedding, decoder._lm_head, decoder._layers])
    nbytes = sum(each.numbers.nbytes + each.scales.nbytes for each in linears.values())
    weights = load_weights(model, torch.float32, CPU, keeps_packed="cpu")
    tables = {id(each): each for each in (weights.embedding, weights.lm_head, weights.norm)}
    layers = [[getattr(layer, field.name) for field in fields(layer)] for layer in weights.layers]
    floats = (each for some in (tables.values(), *layers) for each in some)
    return nbytes + sum(each.nbytes for each in floats if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_of_gguf(tied: bool, kind: Type, tmp_path: Path) -> None:
    """All values, of queries and keys in transformers' order; also the tables."""
    model = small_model(num_hidden_layers=2, tie_word_embeddings=tied)
    described = describe_model(write_gguf(tmp_path / "model.gguf", model, kind=kind))
    packed = load_weights(described, torch.float32, CPU, keeps_packed="cpu")
    wide = load_weights(described, torch.float32, CPU)
    for own, its in zip(packed.layers, wide.layers, strict=True):
        for field in MATRICES:
            matrix = getattr(own, field)
            assert isinstance(matrix, PackedMatrix)
            assert torch.equal(matrix.widened(torch.float32), getattr(its, field)), field
    for own, its in ((packed.embedding, wide.embedding), (packed.lm_head, wide.lm_head)):
        assert torch.equal(own.widened(torch.float32), its)
    assert (packed.lm_head is packed.embedding) == tied
    decoder = _check_decoder(described)
    bits = 8 if kind == Type.Q8_0 else 4
    for table in (decoder._embedding, decoder._lm_head):
        assert isinstance(table, NarrowLinear) and table.bits == bits
    assert (decoder._embedding is decoder._lm_head) == tied


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
    for columns in ((0, shape[1]), (0, half), (half, shape[1])):  # half is inside a block
        box = (10, 30), columns
        wanted, read = whole[10:30, slice(*columns)], read_values(stored, box)
        assert isinstance(read, Quantized) and read.shape == tuple(wanted.shape)
        assert torch.equal(read.widened(torch.float32), wanted)
        part = Part("w", (20, columns[1] - columns[0]), shape, box)
        packing = packing_of({"w": stored}, [part], "cpu")
        assert (packing is None) == (kind in OTHERS)
        if packing is not None:
            matrix = read.packed(packing)
            assert matrix is not None and torch.equal(matrix.widened(torch.float32), wanted)
            numbers.update(matrix.numbers().flatten().tolist())
    assert numbers.keys() == {*NUMBERS.get(kind, ())}
    read, packing = read_values(stored), packing_of({"w": stored}, [Part("w", shape)], "cpu")
    assert isinstance(read, Quantized) and torch.equal(read.widened(torch.float32), whole)
    if packing is not None:
        matrix = read.packed(packing)
        assert matrix is not None and torch.equal(matrix.widened(torch.float32), whole)


def test_blocks_of_other_kinds_are_widened(tmp_path: Path) -> None:
    described = describe_model(write_gguf(tmp_path / "a.gguf", small_model(), kind=Type.Q5_0))
    assert described.config.dtype == "bfloat16"
    decoder = _check_decoder(described)
    assert isinstance(decoder._embedding, torch.Tensor)


def test_a_damaged_scale_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", small_model(), kind=Type.Q4_1)
    described = describe_model(file)
    name = "model.layers.0.mlp.down_proj.weight"
    raw = bytearray(file.read_bytes())
    begin = described.tensors[name].begin
    raw[begin + 2 : begin + 4] = np.float16(np.nan).tobytes()
    file.write_bytes(raw)
    with pytest.raises(ModelError, match=f"{name} in .* is damaged: its scales hold NaN"):
        load_model(described, torch.bfloat16, CPU, quantization="packed")


@pytest.mark.parametrize(
    ("kind", "matrices"),
    [
        ("awq", MATRICES),
        ("gptq", MATRICES),
        ("gptq uneven groups", MATRICES),
        ("packed", MATRICES),
        ("packed with zeros", MATRICES),
        ("packed 8 bits", MATRICES),
        ("int8", MATRICES),
        ("int8 with zeros", ()),
        ("gptq 8 bits", ()),
        ("gptq in order of activations", ()),
        ("fp8 blocks", ()),
    ],
)
def test_quantised_checkpoints(kind: str, matrices: tuple[str, ...], tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", kind).directory
    model = describe_model(directory)
    packed = load_weights(model, torch.float32, CPU, keeps_packed="cpu")
    wide = load_weights(describe_model(tmp_path / "floats"), torch.float32, CPU)
    for own, its in zip(packed.layers, wide.layers, strict=True):
        for field in MATRICES:
            matrix = getattr(own, field)
            assert isinstance(matrix, PackedMatrix) == (field in matrices)
            values = matrix.widened(torch.float32) if field in matrices else matrix
            assert torch.equal(values, getattr(its, field)), field
    _check_decoder(model)


def test_the_start_counts_what_is_kept_and_keeps_its_kv_apart(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", small_model(), kind=Type.Q4_1)
    model, plain = describe_model(file), EngineConfig(device="cpu", dtype="bfloat16")
    narrow, wide = (check_engine(each, model) for each in (PACKED, plain))
    assert narrow is not None and wide is not None
    assert narrow.weights_nbytes < 0.33 * wide.weights_nbytes
    assert narrow.weights_nbytes == pytest.approx(model.stored_nbytes, rel=0.02)
    assert narrow.shape.layout != wide.shape.layout
    assert loading_sentence(PACKED, model, narrow.weights_nbytes) == ""
    said = loading_sentence(PACKED, model, wide.weights_nbytes)
    assert (
        "stay packed, but their scales and unquantised weights become bfloat16; they take " in said
    )
    said = loading_sentence(plain, model, wide.weights_nbytes)
    assert "are converted to bfloat16 when they are loaded; they take " in said


def test_where_nothing_is_kept_it_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(StartupError, match="is not quantised, so nothing is packed") as it:
        check_engine(PACKED, describe_model(tmp_path))
    assert it.value.param == "quantization"
    model = describe_model(write_gguf(tmp_path / "model.gguf", small_model(), kind=Type.Q8_0))
    with pytest.raises(StartupError, match="a GPU always keeps quantised checkpoints packed"):
        check_quantization(PACKED, model.config, "cuda")
