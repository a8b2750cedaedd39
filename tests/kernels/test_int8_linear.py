"""Weights of 8 bits: what is kept of a matrix, and products with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from disagg.kernels.cpu.int8_linear import FEW_ROWS, LARGEST, Int8Linear, quantize
from disagg.kernels.cpu.linear import PlainLinear
from tests.kernels.packed_cases import random_packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    """Rows of very unlike sizes keep their digits, of more rows than are quantised at once."""
    weight = (_random(1500, 40) * torch.logspace(-2, 2, 1500)[:, None]).to(dtype)
    before = weight.clone()
    numbers, scales = quantize(weight)
    assert torch.equal(weight, before)
    assert numbers.dtype == torch.int8 and scales.dtype == dtype
    assert numbers.abs().amax(1).eq(LARGEST).all()
    wide, steps = weight.double(), scales.double()[:, None]
    # The largest value of a row may be more than 127 of its rounded scale.
    rounding = LARGEST * torch.finfo(dtype).eps
    assert ((numbers.double() * steps - wide).abs() <= steps * (0.5 + rounding)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_stay_zero(dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 8, dtype=dtype)
    weight[1, 4] = -0.5
    linear = Int8Linear(weight, None)
    rows = linear.widened()
    assert torch.equal(rows[[0, 2]], weight[[0, 2]])
    assert float(rows[1, 4]) == pytest.approx(-0.5, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (96, 33), (7, 48), (130, 992), (130, 1000), (1, 5)])
@pytest.mark.parametrize("num_rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("in_panels", [False, True])
def test_products_are_those_of_the_widened_weight(
    in_panels: bool, num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias = _random(*shape).to(dtype), _random(shape[0], seed=2).to(dtype)
    linear = Int8Linear(weight, bias)
    whole, ids = linear.widened(), torch.arange(shape[0] - 1, -1, -1)
    if in_panels:
        linear.lay_in_panels(torch.full((linear.panels_nbytes,), 99, dtype=torch.int8))
        assert torch.equal(linear.widened(), whole)
    assert torch.equal(linear.rows(ids), whole[ids])
    twin = PlainLinear(linear.widened().double(), bias.double())
    x, other = (_random(num_rows, size, seed=3).to(dtype) for size in (shape[1], shape[0]))
    for found, wanted in (
        (linear(x), twin(x.double())),
        (Int8Linear(weight, None)(x), twin(x.double()) - bias.double()),
        (linear.silu(x), twin.silu(x.double())),
        (linear.times(x, other), twin.times(x.double(), other.double())),
        (linear.plus(x, other), twin.plus(x.double(), other.double())),
    ):
        assert found.dtype == dtype and found.shape == wanted.shape
        # Widened in half precision, a weight is rounded once more than what torch multiplies.
        error = (found.double() - wanted).norm()
        most = max(4 * torch.finfo(dtype).eps, 3e-6)
        assert error <= most * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("num_rows", [1, 9])
def test_large_activations_stay_finite(num_rows: int) -> None:
    """Of float16 the largest number is 65,504: 127 times these are more."""
    weight = (_random(8, 32) / 100).half()
    x = (_random(num_rows, 32) * 1000).half()
    found = Int8Linear(weight, None)(x)
    assert found.isfinite().all() and found.abs().max() > 1


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("group", [32, 128, None])
@pytest.mark.parametrize("in_panels", [False, True])
def test_numbers_of_checkpoints_stay_as_they_are(
    in_panels: bool, group: int | None, scales: torch.dtype
) -> None:
    """What is rounded is a scale, to the model's type, and then each value."""
    torch.manual_seed(2)
    matrix = random_packed("int8", 130, 328, group, dtype=scales)
    exact, bias = matrix.widened(torch.float32), _random(130, seed=2)
    ids = torch.arange(129, -1, -1)
    for dtype in DTYPES:
        linear = Int8Linear.of_packed(matrix, bias.to(dtype), dtype)
        assert torch.equal(linear.numbers, matrix.numbers())
        if in_panels:
            linear.lay_in_panels(torch.full((linear.panels_nbytes,), 99, dtype=torch.int8))
        lost = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        tiny = 128 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((linear.widened().float() - exact).abs() <= 1.1 * lost * exact.abs() + tiny).all()
        assert torch.equal(linear.rows(ids), linear.widened()[ids])
        for num_rows in (1, FEW_ROWS + 1):
            x = _random(num_rows, 328, seed=3).to(dtype)
            wanted = x.double() @ linear.widened().double().T + bias.to(dtype).double()
            found = linear(x)
            assert found.dtype == dtype
            most = max(4 * torch.finfo(dtype).eps, 3e-6)
            assert (found.double() - wanted).norm() <= most * wanted.norm()
