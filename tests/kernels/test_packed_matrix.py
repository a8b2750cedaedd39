"""Packed weights are the numbers that they were made of, and their bytes are counted."""

from __future__ import annotations

import pytest
import torch

from disagg.kernels.packed_matrix import PackedMatrix, pack_units, quantized, stack
from disagg.kernels.packed_sizes import Kind, Packing, can_pack, quantized_packing
from tests.kernels.packed_cases import random_numbers, random_packed


@pytest.mark.parametrize("num_in", [48, 80, 272])
@pytest.mark.parametrize("group", [None, 16, 32, 128])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_numbers_come_back(kind: Kind, group: int | None, num_in: int) -> None:
    numbers = random_numbers(kind, 5, num_in)
    matrix = PackedMatrix(kind, num_in, group, pack_units(numbers, kind, group), torch.ones(1, 5))
    assert torch.equal(matrix.numbers().view(torch.int8), numbers.view(torch.int8))
    assert matrix.shape == (5, num_in)


def test_a_matrix_is_its_numbers_less_zeros_times_scales() -> None:
    numbers = random_numbers("int4", 3, 40)
    order = torch.randperm(40)
    scales, zeros = torch.rand(3, 3), random_numbers("int4", 3, 3)
    units = pack_units(numbers, "int4", 16)
    wide = PackedMatrix("int4", 40, 16, units, scales, zeros, order).widened(torch.float32)
    for row in range(3):
        for place in range(40):
            own = (place // 16, row)
            wanted = (float(numbers[row, place]) - float(zeros[own])) * scales[own]
            assert wide[row, order[place]] == wanted


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_what_is_counted_is_what_is_kept(kind: Kind, group: int | None, has_zeros: bool) -> None:
    matrix = random_packed(kind, 24, 208, group, has_zeros=has_zeros, dtype=torch.float16)
    assert matrix.nbytes == Packing(kind, group, 2, has_zeros).nbytes((24, 208), "gpu")


def test_matrices_are_stacked_if_they_are_alike() -> None:
    left, right = random_packed("int4", 5, 64, 32), random_packed("int4", 7, 64, 32, has_zeros=True)
    both = stack([left, right])
    assert both is not None
    assert torch.equal(
        both.widened(torch.float32),
        torch.cat([left.widened(torch.float32), right.widened(torch.float32)]),
    )
    for other in (
        random_packed("int4", 5, 64, 16),
        random_packed("int8", 5, 64, 32),
        random_packed("int4", 5, 96, 32),
        random_packed("int4", 5, 64, 32, is_ordered=True),
        random_packed("int4", 5, 64, 32, dtype=torch.float16),
    ):
        assert stack([left, other]) is None


@pytest.mark.parametrize(
    ("kind", "most"), [("fp8", 2.0**-4), ("int8", 0.5 / 127 * 3.3), ("int4", 0.5 / 15 * 6.01)]
)
def test_quantised_floats_are_near(kind: Kind, most: float) -> None:
    """int8 and int4 within half a step, of the largest of a row or the reach of a group."""
    torch.manual_seed(0)
    weight = torch.randn(70, 96).clamp_(-3, 3)
    weight[3] = 0.0
    matrix = quantized(weight, kind)
    wide = matrix.widened(torch.float32)
    assert torch.equal(wide[3], weight[3])
    scale = weight.abs() if kind == "fp8" else torch.ones_like(weight)
    least = 1e-2 if kind == "fp8" else 0.0  # below, e4m3 has fewer digits
    assert ((wide - weight).abs() <= most * scale + least).all()
    assert not torch.equal(wide, weight)
    assert matrix.nbytes == quantized_packing(kind, 4).nbytes((70, 96), "gpu")


def test_groups_that_a_product_can_have() -> None:
    assert [each for each in (None, 8, 16, 24, 32, 100, 128, 1024) if can_pack(each)] == [
        None, 16, 32, 128, 1024,
    ]  # fmt: skip
