"""Products with packed weights equal their reference; run by `test_interpreted.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton.language as tl

from bench.random_models import random_weights
from disagg.kernels import reference
from disagg.kernels.gpu import packed_tile
from disagg.kernels.gpu.eight_bit_tile import kinds_of, quantize_rows, why_16_bits
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.packed_linear import PackedProduct, num_splits
from disagg.kernels.packed_matrix import pack_scales, quantized
from disagg.kernels.packed_sizes import BITS, EIGHT_BIT_ROWS, FP4_KINDS, Kind
from disagg.models.decoder import Decoder
from disagg.models.experts_config import ExpertsConfig
from disagg.models.model_config import ModelConfig
from disagg.models.packing import LAYER_FIELDS
from disagg.models.weights import DecoderWeights, LayerWeights
from tests.grids import pairs, some
from tests.kernels.packed_cases import random_packed
from tests.kernels.test_packed_matrix import E2M1
from tests.models.paging import SMALL, Tokens, new_slab, run_step

CPU = torch.device("cpu")
SINGLE, HALF = 2e-5, 4e-3
HOPPER, ADA = 9, 8
# Attention, which is tested elsewhere, has a program for each head.
FEW_HEADS = replace(SMALL, num_heads=2, num_kv_heads=1)
KINDS: list[tuple[Kind, int | None, bool]] = [
    ("fp8", None, False),
    ("fp8", 128, False),
    ("int8", None, False),
    ("int8", None, True),
    ("int8", 32, True),
    ("int4", None, False),
    ("int4", 16, True),
    ("int4", 32, True),
    ("int4", 128, True),
    ("int4", 64, False),
    ("int4", 512, True),
    ("mxfp4", 16, False),
    ("mxfp4", 32, False),
    ("nvfp4", 16, False),
]


@pytest.mark.parametrize(
    ("format", "shape", "num_programs"), pairs(KINDS, [(1, 37, 80), (11, 150, 1104)], [1, 40])
)
def test_packed_linear(
    format: tuple[Kind, int | None, bool], shape: tuple[int, int, int], num_programs: int
) -> None:
    (kind, group, has_zeros), (num_rows, num_out, num_in) = format, shape
    torch.manual_seed(num_out)
    weight = random_packed(kind, num_out, num_in, group, has_zeros=has_zeros)
    bias = torch.randn(num_out) if num_programs > 1 else None
    x = torch.randn(num_rows, num_in)
    ours = PackedProduct(weight, bias, num_programs, HOPPER)(x)
    theirs = reference.packed_linear(x, weight, bias)
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=SINGLE, rtol=SINGLE)


IN_8_BITS: list[tuple[Kind, int | None, float]] = [
    ("fp8", None, 0.0),
    ("fp8", 128, 0.0),
    ("fp8", 256, 0.02),
    ("int8", None, 0.0),
    ("int8", 128, 0.0),
    ("int8", None, 0.02),
]


def _odd_rows(num_rows: int, num_in: int) -> torch.Tensor:
    """Of which five are zeros, tiny, and with a value that is large, infinite or NaN."""
    x = torch.randn(num_rows, num_in)
    x[1], x[2], x[3, 7], x[4, 5], x[5, 130] = 0.0, x[2] * 1e-41, 3e4, -math.inf, math.nan
    return x


@pytest.mark.parametrize(("kind", "group", "input_scale"), IN_8_BITS)
def test_rows_are_quantised_as_by_the_reference(
    kind: Kind, group: int | None, input_scale: float
) -> None:
    """To the bit; in the order of the weight's bytes, padded with zeros."""
    weight = random_packed(kind, 3, 400, group, input_scale=input_scale)
    x = _odd_rows(9, 400)
    numbers, scales = quantize_rows(x, weight)
    wanted, wanted_scales = reference.quantize_rows(x, weight)
    assert numbers.shape == (9, 512) and numbers.dtype == weight.numbers().dtype
    in_order = numbers.float().view(9, 4, 64, 2).transpose(2, 3).flatten(1)
    assert torch.equal(in_order[:, :400], wanted) and not in_order[:, 400:].any()
    columns = torch.arange(400) // (group or 512)
    torch.testing.assert_close(scales[:, columns], wanted_scales, atol=0, rtol=0, equal_nan=True)
    # The weight's bytes are its numbers in the same order.
    stored = weight.units.view(numbers.dtype).float().view(3, 4, 64, 2).transpose(2, 3).flatten(1)
    assert torch.equal(stored[:, :400], weight.numbers().float())


@pytest.mark.parametrize(
    ("format", "num_out", "num_programs"), pairs(IN_8_BITS, [70, 150], [1, 40])
)
def test_products_in_8_bits(
    format: tuple[Kind, int | None, float], num_out: int, num_programs: int
) -> None:
    """Of many rows only, and not where the GPU, or the weight, is another one."""
    kind, group, input_scale = format
    torch.manual_seed(num_out)
    weight = random_packed(kind, num_out, 1104, group, input_scale=input_scale)
    bias = torch.randn(num_out) if num_programs > 1 else None
    x = _odd_rows(EIGHT_BIT_ROWS + 3, 1104)
    product = PackedProduct(weight, bias, num_programs, HOPPER, kinds_of((9, 0)))
    wanted = reference.eight_bit_linear(x, weight, bias)
    is_sound = wanted.isfinite().all(1)
    assert is_sound.tolist() == [row not in (4, 5) for row in range(len(x))]
    ours = product(x)
    assert ours[~is_sound].isnan().all()
    torch.testing.assert_close(ours[is_sound], wanted[is_sound], atol=SINGLE, rtol=SINGLE)
    in_16_bits = reference.packed_linear(x[6:], weight, bias)
    assert 1e-3 < (ours[6:] - in_16_bits).square().mean().sqrt() < 5e-2
    few = product(x[6 : EIGHT_BIT_ROWS + 3])
    torch.testing.assert_close(few, in_16_bits[: len(few)], atol=SINGLE, rtol=SINGLE)


@pytest.mark.parametrize(
    ("changes", "capability", "words"),
    [
        ({}, (9, 0), ""),
        ({"kind": "int8"}, (8, 0), ""),
        ({}, (8, 6), "no such tensor cores"),
        ({"group": 64}, (9, 0), "groups of 64 columns"),
        ({"input_scale": None}, (9, 0), "does not say"),
        ({"kind": "int8", "has_zeros": True}, (9, 0), "zero points"),
        ({"kind": "int4", "group": 32}, (10, 0), "only fp8 and int8"),
    ],
)
def test_which_products_are_in_8_bits(
    changes: dict[str, Any], capability: tuple[int, int], words: str
) -> None:
    how: dict[str, Any] = {"kind": "fp8", "input_scale": 0.0, **changes}
    why = why_16_bits(random_packed(num_out=16, num_in=256, **how), kinds_of(capability))
    assert words in why and bool(words) == bool(why)


def test_columns_are_shared_by_many_programs_and_by_one() -> None:
    assert num_splits(num_tiles=2, num_chunks=9, num_programs=40) == 2
    assert num_splits(num_tiles=2, num_chunks=9, num_programs=1) == 1
    assert num_splits(num_tiles=64, num_chunks=112, num_programs=396) == 7
    assert num_splits(num_tiles=448, num_chunks=32, num_programs=396) == 1
    assert num_splits(num_tiles=1, num_chunks=1, num_programs=396) == 1


@pytest.mark.parametrize("major", [HOPPER, ADA])
def test_tiles_of_many_rows_in_bands(major: int) -> None:
    """More than a band of tiles of rows, the last of which is lower."""
    weight = random_packed("int4", 300, 96, 32, has_zeros=True)
    x = torch.randn(9 * 128 + 5, 96)
    ours = PackedProduct(weight, None, 4, major)(x)
    torch.testing.assert_close(
        ours, reference.packed_linear(x, weight, None), atol=SINGLE, rtol=SINGLE
    )


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"), [KINDS[1], KINDS[4], KINDS[8], *KINDS[-2:]]
)
def test_half_precision(kind: Kind, group: int | None, has_zeros: bool) -> None:
    weight = random_packed(kind, 65, 208, group, has_zeros=has_zeros, dtype=torch.float16)
    x, bias = torch.randn(17, 208).half(), torch.randn(65).half()
    ours = PackedProduct(weight, bias, 1, HOPPER)(x)
    torch.testing.assert_close(ours, reference.packed_linear(x, weight, bias), atol=HALF, rtol=HALF)


def test_columns_in_the_order_of_activations() -> None:
    weight = random_packed("int4", 40, 96, 32, has_zeros=True, is_ordered=True)
    x = torch.randn(3, 96)
    ours = PackedProduct(weight, None, 1, HOPPER)(x)
    torch.testing.assert_close(
        ours, reference.packed_linear(x, weight, None), atol=SINGLE, rtol=SINGLE
    )


@pytest.mark.parametrize("num_programs", [1, 40])
def test_what_other_rows_hold_does_not_change_a_row(num_programs: int) -> None:
    """In steps of as many rows; with other numbers of them, sums are in another order."""
    weight = quantized(torch.randn(70, 600), "int8")
    x = torch.randn(6, 600)
    product = PackedProduct(weight, None, num_programs, HOPPER)
    expected = product(x)[4:]
    x[:3], x[3] = torch.randn(3, 600), torch.nan
    assert torch.equal(product(x)[4:], expected)


class TorchUnits:
    """What `numbers_of` does to a tensor, done by torch: Triton's interpreter has no bfloat16."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __lshift__(self, count: int) -> TorchUnits:
        return TorchUnits(self.value << count)

    def __rshift__(self, count: int) -> TorchUnits:
        return TorchUnits(self.value >> count)

    def __and__(self, mask: int) -> TorchUnits:
        return TorchUnits(self.value & mask)

    def __or__(self, other: TorchUnits | int) -> TorchUnits:
        return TorchUnits(self.value | (other.value if isinstance(other, TorchUnits) else other))

    def __add__(self, other: int) -> TorchUnits:
        return TorchUnits(self.value + other)

    def __mul__(self, factor: float) -> TorchUnits:
        return TorchUnits(self.value * factor)

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> TorchUnits:
        wanted = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}.get(dtype.name, ""), None)
        wanted = (
            wanted or {"fp32": torch.float32, "int32": torch.int32, "int8": torch.int8}[dtype.name]
        )
        return TorchUnits(self.value.view(wanted) if bitcast else self.value.to(wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "mxfp4", "nvfp4"])
def test_all_numbers_become_floats_exactly(kind: Kind, dtype: torch.dtype) -> None:
    """Those of all units there are, in each type of activations."""
    bits, in_triton = BITS[kind], getattr(tl, str(dtype).removeprefix("torch."))
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for part in range(16 // bits):
        numbers = (every.int() >> (part * bits)) & ((1 << bits) - 1)
        wanted = numbers.float()
        if kind == "int8":
            wanted = numbers.to(torch.int8).float()
        elif kind == "fp8":
            wanted = numbers.to(torch.uint8).view(torch.float8_e4m3fn).float()
        elif kind in FP4_KINDS:
            wanted = torch.tensor(E2M1)[numbers]
        found = packed_tile.numbers_of.fn(TorchUnits(every), part, kind, in_triton).value
        assert found.dtype == dtype
        if kind == "int4":
            zero = torch.tensor([-8, 0, 7], dtype=torch.int8)
            base = packed_tile.base_of.fn(TorchUnits(zero), bits, in_triton).value
            assert base.dtype == dtype
            wanted = wanted[:, None] - 8 - zero
            found = found[:, None] - base
        is_number = ~wanted.isnan()
        assert torch.equal(found.float()[is_number], wanted[is_number])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("mxfp4", torch.float8_e8m0fnu), ("nvfp4", torch.float8_e4m3fn)]
)
def test_all_scales_of_8_bits_become_floats_exactly(kind: Kind, dtype: torch.dtype) -> None:
    """But for NaN, which no weight has, and the least power of two, which no float16 has."""
    every = torch.randperm(256).to(torch.uint8).view(4, 64).view(dtype)
    words = pack_scales(every)
    for place, wanted in enumerate(every.float()):
        found = packed_tile.scale_of.fn(TorchUnits(words[0]), place, kind).value
        is_usual = ~wanted.isnan() & (wanted != 2.0**-127)
        assert is_usual.sum() >= 62 and torch.equal(found[is_usual], wanted[is_usual])


OF_ALL: list[Kind] = ["fp8", "int8", "int4"]


def _packed_and_wide(
    layers: Iterable[LayerWeights], kind: Kind
) -> tuple[list[LayerWeights], list[LayerWeights]]:
    """Layers with quantised matrices, and with the floats that these stand for."""
    packed, wide = [], []
    for layer in layers:
        matrices: dict[str, Any] = {
            name: quantized(getattr(layer, name), kind)
            for name in LAYER_FIELDS
            if getattr(layer, name) is not None
        }
        packed.append(replace(layer, **matrices))
        floats: dict[str, Any] = {
            name: each.widened(torch.float32) for name, each in matrices.items()
        }
        wide.append(replace(layer, **floats))
    return packed, wide


def _logits(config: ModelConfig, weights: DecoderWeights, ops: TritonOps | None) -> torch.Tensor:
    """Of a prompt, and a step after it."""
    decoder = Decoder(config, weights, ops)
    slab = new_slab(config, 16, 8, torch.float32, fill=torch.nan)
    tokens = Tokens(list(range(12)), [9, 2, 3])
    run_step(decoder, slab, [(tokens, 10)], 8)
    run_step(decoder, slab, [(tokens, 1)], 8)
    return torch.stack(tokens.logits)


@pytest.mark.parametrize(
    ("kind", "by_ops"),
    some([("fp8", True), ("int8", False), ("int4", True)], product(OF_ALL, (True, False))),
)
def test_a_decoder_with_packed_matrices_equals_one_with_the_widened(
    kind: Kind, by_ops: bool
) -> None:
    """Of attention, a shared MLP and experts. Quantised before, or by the operations, which leave
    alone what chooses experts."""
    experts = ExpertsConfig(
        num_experts=5,
        num_experts_per_tok=2,
        intermediate_size=40,
        shared_intermediate_size=24,
    )
    config = replace(FEW_HEADS, family="Qwen2MoeForCausalLM", experts=experts)
    weights = random_weights(config, torch.float32, CPU, seed=2)
    packed, wide = _packed_and_wide(weights.layers, kind)
    wanted = _logits(config, replace(weights, layers=wide), None)
    assert wanted.abs().max() > 0.1
    ops = TritonOps(2, 1, quantization=kind if by_ops else None)
    given = weights if by_ops else replace(weights, layers=packed)
    torch.testing.assert_close(_logits(config, given, ops), wanted, atol=SINGLE, rtol=SINGLE)
