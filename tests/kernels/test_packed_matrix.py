"""Packed weights are the numbers that they were made of, and their bytes are counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from disagg.kernels import reference
from disagg.kernels.packed_matrix import PackedMatrix, pack_scales, pack_units, quantized, stack
from disagg.kernels.packed_sizes import FP4_KINDS, Kind, Packing, can_pack, quantized_packing
from tests.kernels.packed_cases import random_numbers, random_packed

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats, section 5.3.3
E2M1 += [-each for each in E2M1]


@pytest.mark.parametrize("num_in", [48, 80, 272])
@pytest.mark.parametrize("group", [None, 16, 32, 128])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "nvfp4"])
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


def test_every_number_and_scale_of_nvfp4() -> None:
    """Exact in float32 but for the global scale, which rounds once, whatever the signs are."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = scales[~scales.float().isnan()]
    numbers = torch.arange(16).expand(len(scales), 16).to(torch.int8)
    units = pack_units(numbers, "nvfp4", 16)
    of_rows = torch.rand(len(scales)) + 0.5
    matrix = PackedMatrix("nvfp4", 16, 16, units, pack_scales(scales[None]), row_scales=of_rows)
    wanted = torch.tensor(E2M1).double() * scales.double()[:, None] * of_rows.double()[:, None]
    assert len(wanted) == 254
    assert torch.equal(matrix.widened(torch.float32), wanted.float())
    exact = replace(matrix, row_scales=None)
    for dtype in (torch.bfloat16, torch.float16):  # as kernels have numbers times scales
        assert torch.equal(exact.widened(dtype).float(), exact.widened(torch.float32))


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [
        *product(("fp8", "int8", "int4"), (None, 32), (False, True)),
        ("mxfp4", 32, False),
        ("nvfp4", 16, False),
    ],
)
def test_what_is_counted_is_what_is_kept(kind: Kind, group: int | None, has_zeros: bool) -> None:
    matrix = random_packed(kind, 24, 208, group, has_zeros=has_zeros, dtype=torch.float16)
    packing = Packing(kind, group, 1 if kind in FP4_KINDS else 2, has_zeros)
    assert matrix.nbytes == packing.nbytes((24, 208), "gpu")


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_matrices_are_stacked_if_they_are_alike(kind: Kind) -> None:
    left = random_packed(kind, 5, 64, 32)
    right = random_packed(kind, 7, 64, 32, has_zeros=kind == "int4")
    both = stack([left, right])
    assert both is not None
    wide = torch.cat([left.widened(torch.float32), right.widened(torch.float32)])
    assert torch.equal(both.widened(torch.float32), wide)
    assert torch.equal(both.rows(3, 9).widened(torch.float32), wide[3:9])
    for other in (
        random_packed(kind, 5, 64, 16),
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


def test_ranks_round_activations_no_more_coarsely_than_one_rank_does() -> None:
    """Each has half of the columns of a matrix and of a token's activations, which it quantises by
    itself: half a step of its own scale off at most, and that is at most the scale of all."""
    torch.manual_seed(1)
    weight = random_packed("int8", 32, 512, input_scale=0.0)
    x = torch.randn(16, 512) * torch.linspace(0.2, 3.0, 512)
    wide = weight.widened(torch.float32)
    parts = []
    for columns in (slice(0, 256), slice(256, 512)):
        units = pack_units(weight.numbers()[:, columns].contiguous(), "int8", None)
        part = replace(weight, num_in=256, units=units)
        assert torch.equal(part.widened(torch.float32), wide[:, columns])
        parts.append(reference.eight_bit_linear(x[:, columns], part, None))
    alone = reference.eight_bit_linear(x, weight, None)
    exact = x.double() @ wide.T.double()
    half_a_step = x.abs().amax(1, keepdim=True).double() / 127 / 2
    bound = half_a_step * wide.abs().sum(1).double() + 1e-5
    together = parts[0] + parts[1]
    errors = [(each - exact).abs() for each in (alone, together)]
    assert (errors[0] <= bound).all() and (errors[1] <= bound).all()
    assert not torch.allclose(together, alone, atol=1e-4)  # they are not the same numbers


def test_groups_that_a_product_can_have() -> None:
    assert [each for each in (None, 8, 16, 24, 32, 100, 128, 1024) if can_pack(each)] == [
        None, 16, 32, 128, 1024,
    ]  # fmt: skip
