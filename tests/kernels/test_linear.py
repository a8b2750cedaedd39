"""Packed products equal plain ones, and see few different numbers of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels.linear import ROWS_AT_ONCE, PackedLinear, PlainLinear

IN, OUT = 24, 40


@pytest.fixture
def both() -> tuple[PlainLinear, PackedLinear]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(OUT, IN, generator=generator)
    bias = torch.randn(OUT, generator=generator)
    return PlainLinear(weight, bias), PackedLinear(weight, bias)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 127, 128, 200])
def test_packed_equals_plain(both: tuple[PlainLinear, PackedLinear], num_rows: int) -> None:
    plain, packed = both
    x, other = torch.randn(num_rows, IN), torch.randn(num_rows, OUT)
    for found, expected in (
        (packed(x), plain(x)),
        (packed.silu(x), plain.silu(x)),
        (packed.times(x, other), plain.times(x, other)),
        (packed.plus(x, other), plain.plus(x, other)),
    ):
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found, expected)


def test_prompts_of_all_lengths_need_few_programs(
    both: tuple[PlainLinear, PackedLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, packed = both
    seen: set[int] = set()

    def recorded(x: Tensor, *rest: Any) -> Tensor:
        seen.add(x.shape[0])
        return x.new_zeros(x.shape[0], OUT)

    monkeypatch.setattr(packed, "_unary", recorded)
    monkeypatch.setattr(packed, "_binary", recorded)
    for num_rows in range(ROWS_AT_ONCE, 1025):
        assert packed.silu(torch.zeros(num_rows, IN)).shape[0] == num_rows
        assert (
            packed.plus(torch.zeros(num_rows, IN), torch.zeros(num_rows, OUT)).shape[0] == num_rows
        )
    assert seen == set(range(ROWS_AT_ONCE, 1025, ROWS_AT_ONCE))
