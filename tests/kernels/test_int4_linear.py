"""Weights of 4 bits: what is kept of a matrix, and products with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from disagg.kernels.int4_groups import GROUP
from disagg.kernels.int4_linear import LARGEST, Int4Linear, quantize
from disagg.kernels.linear import PANEL, PlainLinear
from tests.kernels.compiled import can_run_step, compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (96, 32), (7, 48), (130, 992), (70, 8), (1, 200)]


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [96, 200, 5])
def test_no_value_is_off_by_more_than_half_a_step(num_in: int, dtype: torch.dtype) -> None:
    """Rows of very unlike sizes keep their digits, of more rows than are quantised at once."""
    weight = (_random(1500, num_in) * torch.logspace(-2, 2, 1500)[:, None]).to(dtype)
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
@pytest.mark.parametrize("shape", [*SHAPES, (5, 33)])
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_products_are_those_of_the_widened_weight(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias = _random(*shape).to(dtype), _random(shape[0], seed=2).to(dtype)
    linear, ids = Int4Linear(weight, bias), torch.arange(shape[0] - 1, -1, -1)
    assert torch.equal(linear.rows(ids), linear.widened()[ids])
    twin = PlainLinear(linear.widened().double(), bias.double())
    x = _random(num_rows, shape[1], seed=3).to(dtype)
    for found, wanted in ((linear(x), twin(x.double())), (linear.silu(x), twin.silu(x.double()))):
        assert found.dtype == dtype and found.shape == wanted.shape
        error = (found.double() - wanted).norm()
        most = max(4 * torch.finfo(dtype).eps, 3e-6)
        assert error <= most * max(1.0, float(wanted.norm()))


needs_step = pytest.mark.skipif(not can_run_step(), reason="this CPU lacks the instructions")


def _in_panels(linear: Int4Linear, tmp_path_factory: pytest.TempPathFactory) -> Int4Linear:
    found = compiled(tmp_path_factory.getbasetemp() / "compiled")
    assert found.loaded is not None, found.sentence
    memory = torch.full((linear.panels_nbytes,), 99, dtype=torch.uint8)
    linear.lay_in_panels(memory, found.loaded)
    return linear


@needs_step
@pytest.mark.parametrize("shape", [*SHAPES, (1200, 640)])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 6, 7, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_products_are_those_of_the_numbers(
    threads: int,
    num_rows: int,
    shape: tuple[int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In double, of the numbers and scales themselves: nothing is rounded but sums and results."""
    dtype = torch.bfloat16
    weight, bias = _random(*shape).to(dtype), _random(shape[0], seed=2).to(dtype)
    linear = Int4Linear(weight, bias)
    groups = torch.arange(shape[1]) // GROUP
    numbers = torch.stack((linear.numbers & LARGEST, linear.numbers >> 4), 2).flatten(1)
    scales, least = linear.scales.double().unbind(2)
    exact = numbers * scales[:, groups] + least[:, groups]
    whole, ids = linear.widened(), torch.arange(shape[0] - 1, -1, -1)
    _in_panels(linear, tmp_path_factory)
    assert torch.equal(linear.widened(), whole) and torch.equal(linear.rows(ids), whole[ids])
    x = _random(num_rows, shape[1], seed=3).to(dtype)
    wanted = x.double() @ exact.T + bias.double()
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = linear(x)
    finally:
        torch.set_num_threads(num_threads)
    assert found.dtype == dtype and found.shape == wanted.shape
    # A half of bfloat16's last digit, and what adding up in float32 loses.
    bound = wanted.abs() * 2.0**-8 + 1e-5 * (x.double().abs() @ exact.abs().T)
    assert ((found.double() - wanted).abs() <= bound).all()
    if num_rows:  # a result does not depend on the other rows
        assert torch.equal(linear(x[-1:])[0], found[-1])
        assert torch.equal(linear(torch.cat((x, x), 1)[:, : shape[1]]), found)


@needs_step
def test_where_a_number_lies_in_a_panel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As csrc/int4.h says, of a weight whose numbers are 0 but for one."""
    for row, column in ((0, 0), (17, 3), (63, 15), (64, 8), (70, 22)):
        weight = torch.zeros(80, 24, dtype=torch.bfloat16)
        weight[row, column], weight[row, (column + 1) % 24] = 15.0, 1.0
        linear = _in_panels(Int4Linear(weight, None), tmp_path_factory)
        panel, vector = row // PANEL, row % PANEL // 16
        words = linear.numbers[panel, column // 8, vector].view(torch.int16)
        word = int(words[2 * (row % 16) + column % 2]) & 0xFFFF
        assert word >> (4 * (column % 8 // 2)) & 15 == 15
        assert linear.scales[panel, 0, :, row % PANEL].tolist() == [1.0, 0.0]
