"""Weights of 4 bits: what is kept of a matrix, and products with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.int4_groups import GROUP
from disagg.kernels.int4_linear import LARGEST, Int4Linear, quantize
from disagg.kernels.linear import PlainLinear

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
