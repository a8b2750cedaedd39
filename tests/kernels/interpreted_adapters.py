"""LoRA kernels equal their torch twin; run by `test_interpreted.py`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from disagg.kernels.adapters import AdaptedMatrix, AdapterRows, adapt_rows_
from disagg.kernels.gpu import adapters as gpu
from disagg.kernels.gpu.adapters import AdapterGroups

CPU = torch.device("cpu")
NUM_SLOTS = 4
OF_STEPS = {
    "one each": [0, 1, 2, 3, -1],
    "some have none": [-1, 2, -1, -1, 2, 0, -1],
    "none has any": [-1, -1],
    "more than a tile of one": [3] * 18 + [-1] + [0] * 3,
}


def random_tables(nums_out: list[int], num_in: int, rank: int) -> AdaptedMatrix:
    """Slots with adapters of several ranks, of which the last has been written twice."""
    matrix = AdaptedMatrix.empty(NUM_SLOTS, rank, nums_out, num_in, torch.float32, CPU)
    for slot in (*range(NUM_SLOTS), NUM_SLOTS - 1):
        matrix.clear(slot)
        for output, num_out in enumerate(nums_out):
            own = max(1, rank - 3 * slot - output)
            a, b = torch.randn(own, num_in) / num_in**0.5, torch.randn(num_out, own)
            matrix.write(slot, output, a, b)
    return matrix


def compare(matrix: AdaptedMatrix, adapters: Tensor, x: Tensor) -> None:
    out = torch.randn(x.shape[0], matrix.bounds[-1])
    ours = gpu.adapt_rows_(out.clone(), x, matrix, AdapterGroups.of(adapters, NUM_SLOTS))
    theirs = adapt_rows_(out.clone(), x, matrix, AdapterRows.of(adapters))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert torch.equal(ours[adapters < 0], out[adapters < 0])
    if (adapters >= 0).any():
        assert not torch.equal(ours, out)


@pytest.mark.parametrize("step", OF_STEPS)
@pytest.mark.parametrize(
    ("nums_out", "num_in", "rank"),
    [([70], 100, 16), ([40, 24, 24], 48, 48), ([130, 130], 600, 32)],
)
def test_rows_get_what_their_adapters_add(
    nums_out: list[int], num_in: int, rank: int, step: str
) -> None:
    torch.manual_seed(num_in)
    adapters = torch.tensor(OF_STEPS[step], dtype=torch.int32)
    compare(random_tables(nums_out, num_in, rank), adapters, torch.randn(len(adapters), num_in))


def test_a_step_of_many_rows() -> None:
    """Its tiles are higher, and no columns are shared; the activations are part of wider rows."""
    torch.manual_seed(1)
    adapters = torch.randint(-1, NUM_SLOTS, (gpu.MOST_FEW + 3,), dtype=torch.int32)
    x = torch.randn(len(adapters), 100)[:, :80]
    compare(random_tables([20, 12], 80, 16), adapters, x)


def test_nan_stays_in_its_row() -> None:
    torch.manual_seed(2)
    matrix = random_tables([40, 24, 24], 48, 16)
    adapters = torch.tensor([1, 1, 2, -1], dtype=torch.int32)
    x, out = torch.randn(4, 48), torch.zeros(4, 88)
    groups = AdapterGroups.of(adapters, NUM_SLOTS)
    clean = gpu.adapt_rows_(out.clone(), x, matrix, groups)
    x[1, 5] = math.nan
    ours = gpu.adapt_rows_(out.clone(), x, matrix, groups)
    assert ours[1].isnan().all()
    assert torch.equal(ours[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("rank", [16, 80, 256])
def test_half_precision_rounds_where_torch_rounds(rank: int) -> None:
    torch.manual_seed(rank)
    single = random_tables([40], 128, rank)
    matrix = AdaptedMatrix(
        single.a.half(), single.b.half(), single.bounds, single.rank, single.ranks
    )
    adapters = torch.tensor([0, 3, -1], dtype=torch.int32)
    x, out = torch.randn(3, 128).half(), torch.randn(3, 40).half()
    ours = gpu.adapt_rows_(out.clone(), x, matrix, AdapterGroups.of(adapters, NUM_SLOTS))
    theirs = adapt_rows_(out.clone(), x, matrix, AdapterRows.of(adapters))
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=4e-3)
