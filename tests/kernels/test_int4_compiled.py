"""Compiled products with weights of 4 bits. Collected where they can be built and run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from disagg.kernels.cpu.int4_groups import GROUP
from disagg.kernels.cpu.int4_linear import LARGEST, Int4Linear
from disagg.kernels.cpu.library import Found
from disagg.kernels.cpu.matrix import PANEL
from disagg.kernels.cpu.narrow_rows import FEW_ROWS
from tests.kernels.test_int4_linear import SHAPES, packed_matrices, random_values


def _in_panels(linear: Int4Linear, step: Found) -> Int4Linear:
    assert step.loaded is not None
    memory = torch.full((linear.panels_nbytes,), 99, dtype=torch.uint8)
    linear.lay_in_panels(memory, step.loaded)
    return linear


@pytest.mark.parametrize("shape", [*SHAPES, (1200, 640)])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 6, 7, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_products_are_those_of_the_numbers(
    threads: int, num_rows: int, shape: tuple[int, int], step: Found
) -> None:
    """In double, of the numbers and scales themselves: nothing is rounded but sums and results."""
    dtype = torch.bfloat16
    weight, bias = random_values(*shape).to(dtype), random_values(shape[0], seed=2).to(dtype)
    linear = Int4Linear(weight, bias)
    groups = torch.arange(shape[1]) // GROUP
    numbers = torch.stack((linear.numbers & LARGEST, linear.numbers >> 4), 2).flatten(1)
    scales, least = linear.scales.double().unbind(2)
    exact = numbers * scales[:, groups] + least[:, groups]
    whole, ids = linear.widened(), torch.arange(shape[0] - 1, -1, -1)
    _in_panels(linear, step)
    assert torch.equal(linear.widened(), whole) and torch.equal(linear.rows(ids), whole[ids])
    x = random_values(num_rows, shape[1], seed=3).to(dtype)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = linear(x)
    finally:
        torch.set_num_threads(num_threads)
    assert found.dtype == dtype and found.shape == (num_rows, shape[0])
    _check_products(linear, x, exact, whole, found, bias)
    if num_rows:  # a result does not depend on the other rows
        count = FEW_ROWS + 1 if _is_widened(linear, num_rows) else 1
        assert torch.equal(linear(x[-count:])[-1], found[-1])
        assert torch.equal(linear(torch.cat((x, x), 1)[:, : shape[1]]), found)


def _is_widened(linear: Int4Linear, num_rows: int) -> bool:
    """Whether AMX multiplies with the weight in bfloat16, in which each value was rounded."""
    assert linear._library is not None
    return num_rows > FEW_ROWS and bool(linear._library.disagg_step_has_tiles())


def _check_products(
    linear: Int4Linear, x: Tensor, exact: Tensor, rounded: Tensor, found: Tensor, bias: Tensor
) -> None:
    """Of numbers and scales as they are, or of the rounded values where the weight is widened."""
    is_widened = _is_widened(linear, x.shape[0])
    values = rounded.double() if is_widened else exact
    wanted = x.double() @ values.T + bias.double()
    # A half of bfloat16's last digit, and what adding up in float32 loses.
    bound = wanted.abs() * 2.0**-8 + 1e-5 * (x.double().abs() @ values.abs().T)
    if is_widened and x.shape[0]:  # a value between two others may be rounded to the other one
        bound += 2.0**-8 * x.double().abs().amax(1, True) * values.abs().amax(1)
    assert ((found.double() - wanted).abs() <= bound).all()


def test_where_a_number_lies_in_a_panel(step: Found) -> None:
    """As csrc/int4.h says, of a weight whose numbers are 0 but for one."""
    for row, column in ((0, 0), (17, 3), (63, 15), (64, 8), (70, 22)):
        weight = torch.zeros(80, 24, dtype=torch.bfloat16)
        weight[row, column], weight[row, (column + 1) % 24] = 15.0, 1.0
        linear = _in_panels(Int4Linear(weight, None), step)
        panel, vector = row // PANEL, row % PANEL // 16
        words = linear.numbers[panel, column // 8, vector].view(torch.int16)
        word = int(words[2 * (row % 16) + column % 2]) & 0xFFFF
        assert word >> (4 * (column % 8 // 2)) & 15 == 15
        assert linear.scales[panel, 0, :, row % PANEL].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("num_rows", [1, 7, 33])
def test_numbers_of_checkpoints_in_groups_of_their_own(num_rows: int, step: Found) -> None:
    """Groups of 16, 32 and 128 numbers, the last one shorter, and one a row."""
    for matrix in packed_matrices(130, 328, torch.float16):
        linear = Int4Linear.of_packed(matrix, None, torch.bfloat16)
        whole = linear.widened()
        scales, least = linear.scales.double().unbind(2)
        groups = torch.arange(328) // linear.group
        exact = (matrix.numbers() + 8) * scales[:, groups] + least[:, groups]
        _in_panels(linear, step)
        assert torch.equal(linear.widened(), whole)
        x = random_values(num_rows, 328, seed=3).bfloat16()
        _check_products(linear, x, exact, whole, linear(x), torch.zeros(130))
