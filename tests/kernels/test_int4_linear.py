"""Weights of 4 bits: what is kept of a matrix, and products with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.int4_groups import GROUP
from disagg.kernels.cpu.int4_linear import LARGEST, Int4Linear, quantize
from disagg.kernels.cpu.linear import PlainLinear
from disagg.kernels.packed_matrix import PackedMatrix
from tests.kernels.packed_cases import random_packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (96, 32), (7, 48), (130, 992), (70, 8), (1, 200)]


def random_values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [96, 200, 5])
def test_no_value_is_off_by_more_than_half_a_step(num_in: int, dtype: torch.dtype) -> None:
    """Rows of very unlike sizes keep their digits, of more rows than are quantised at once."""
    weight = (random_values(1500, num_in) * torch.logspace(-2, 2, 1500)[:, None]).to(dtype)
    before = weight.clone()
    numbers, scales = quantize(weight)
    assert torch.equal(weight, before)
    assert numbers.dtype == torch.uint8 and scales.dtype == dtype
    assert numbers.shape == (1500, -(-num_in // 2))
    assert scales.shape == (1500, -(-num_in // GROUP), 2)
    wide = weight.double()
    for group in range(scales.shape[1]):
        columns = range(group * GROUP, min((group + 1) * GROUP, num_in))
        step, least = scales[:, group].double().unbind(1)
        for column in columns:
            number = numbers[:, column // 2].long() >> (4 * (column % 2)) & LARGEST
            off = (number * step + least - wide[:, column]).abs()
            # The ends of a group may lie outside of what its rounded scale and least value reach.
            rounding = torch.finfo(dtype).eps * (LARGEST * step + least.abs())
            assert (off <= step / 2 + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_equal_numbers_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 256, dtype=dtype)
    weight[1, 128:] = -0.5
    assert torch.equal(Int4Linear(weight, None).widened(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 33), (1200, 40)])
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_products_are_those_of_the_widened_weight(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias = random_values(*shape).to(dtype), random_values(shape[0], seed=2).to(dtype)
    linear, ids = Int4Linear(weight, bias), torch.arange(shape[0] - 1, -1, -1)
    assert torch.equal(linear.rows(ids), linear.widened()[ids])
    twin = PlainLinear(linear.widened().double(), bias.double())
    x = random_values(num_rows, shape[1], seed=3).to(dtype)
    for found, wanted in ((linear(x), twin(x.double())), (linear.silu(x), twin.silu(x.double()))):
        assert found.dtype == dtype and found.shape == wanted.shape
        error = (found.double() - wanted).norm()
        most = max(4 * torch.finfo(dtype).eps, 3e-6)
        assert error <= most * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_compiled_code_torch_multiplies_the_widened_weight(dtype: torch.dtype) -> None:
    """As on every CPU that lacks the instructions; of a shape that compiled code would take."""
    weight, bias = random_values(130, 992).to(dtype), random_values(130, seed=2).to(dtype)
    linear, x = Int4Linear(weight, bias), random_values(7, 992, seed=3).to(dtype)
    assert linear.can_be_in_panels
    assert torch.equal(linear(x), functional.linear(x, linear.widened()) + bias)


# Numbers of checkpoints: a size of their groups (None: a row), zeros, least values.
PACKED = [
    (32, False, True),
    (32, False, False),
    (128, True, False),
    (16, True, False),
    (None, True, False),
]


def packed_matrices(num_out: int, num_in: int, dtype: torch.dtype) -> list[PackedMatrix]:
    torch.manual_seed(num_out)
    return [
        random_packed("int4", num_out, num_in, group, has_zeros=zeros, has_least=least, dtype=dtype)
        for group, zeros, least in PACKED
    ]


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1500, 96), (70, 8), (33, 328)])
def test_numbers_of_checkpoints_stay_as_they_are(
    shape: tuple[int, int], scales: torch.dtype
) -> None:
    """In float32 their values, too; in half precision these are off by less than their scale was
    rounded by in the middle of a group, and twice that at its ends."""
    for matrix in packed_matrices(*shape, scales):
        exact, numbers = matrix.widened(torch.float32), matrix.numbers() + 8
        group = matrix.group or matrix.num_in
        steps = matrix.scales.float().T.repeat_interleave(group, 1)[:, : matrix.num_in]
        for dtype in DTYPES:
            linear = Int4Linear.of_packed(matrix, None, dtype)
            packed = numbers.to(torch.uint8)
            assert torch.equal(linear.numbers, packed[:, 0::2] | packed[:, 1::2] << 4)
            assert linear.scales.dtype == dtype and linear.group == group
            off = (linear.widened().float() - exact).abs()
            if dtype == torch.float32:
                assert (off <= 2.0**-22 * 31 * steps).all()
                continue
            # A scale times up to 15, a least value of up to 31 of them, and the value itself.
            lost = torch.finfo(dtype).eps / 2
            tiny = 16 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            assert (off <= lost * 1.1 * (15 + 31 + 31) * steps + tiny).all()
            # The values of a group are off in both directions.
            if dtype == scales:
                assert torch.equal(linear.scales[:, :, 0], matrix.scales.T)


def test_symmetric_groups_of_bfloat16_lose_nothing() -> None:
    torch.manual_seed(3)
    matrix = random_packed("int4", 40, 256, 128, dtype=torch.bfloat16)
    linear = Int4Linear.of_packed(matrix, None, torch.bfloat16)
    assert torch.equal(linear.widened(), matrix.widened(torch.bfloat16))


def test_a_group_whose_scale_was_rounded_is_off_in_both_directions() -> None:
    torch.manual_seed(4)
    matrix = random_packed("int4", 256, 256, 32, has_least=True, dtype=torch.float16)
    linear = Int4Linear.of_packed(matrix, None, torch.bfloat16)
    scales, least = linear.scales.double().repeat_interleave(32, 1).unbind(2)
    off = (matrix.numbers() + 8) * scales + least - matrix.widened(torch.float64)
    means = off.view(-1, 32).mean(1)
    # Of a group only what the least value itself lost, which is at most 15 scales.
    most = least.abs().view(-1, 32)[:, 0] * 2.0**-8
    assert (means.abs() <= most).all()
    assert off.abs().max() > 0


@pytest.mark.parametrize("num_rows", [1, 70])
def test_products_with_numbers_of_checkpoints(num_rows: int) -> None:
    bias, ids = random_values(130, seed=2).bfloat16(), torch.arange(129, -1, -1)
    x = random_values(num_rows, 328, seed=3).bfloat16()
    for matrix in packed_matrices(130, 328, torch.float16):
        linear = Int4Linear.of_packed(matrix, bias, torch.bfloat16)
        assert torch.equal(linear.rows(ids), linear.widened()[ids])
        wanted = x.double() @ linear.widened().double().T + bias.double()
        error = (linear(x).double() - wanted).norm()
        assert error <= 4 * torch.finfo(torch.bfloat16).eps * wanted.norm()
