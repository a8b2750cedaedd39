"""Packed products equal plain ones, see few different numbers of rows, and fit their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.linear import (
    ROWS_AT_ONCE,
    HalfLinear,
    PackedLinear,
    PlainLinear,
    fits_half,
    linear,
)

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
        (packed.gelu_tanh(x), plain.gelu_tanh(x)),
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


def _drawn(num_rows: int, num_columns: int, deviation: float = 0.02) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_rows, num_columns, generator=generator) * deviation


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64, 121])
@pytest.mark.parametrize(("num_in", "num_out"), [(24, 40), (1, 1), (7, 3), (513, 17)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_half_equals_plain(num_in: int, num_out: int, with_bias: bool, num_rows: int) -> None:
    weight = _drawn(num_out, num_in, num_in**-0.5).half().float()
    bias = torch.randn(num_out) if with_bias else None
    plain, half = PlainLinear(weight, bias), HalfLinear(weight, bias)
    x, other = torch.randn(num_rows, num_in), torch.randn(num_rows, num_out)
    strided = torch.randn(num_in, num_rows).t()
    for found, expected in (
        (half(x), plain(x)),
        (half(strided), plain(strided)),
        (half.silu(x), plain.silu(x)),
        (half.gelu_tanh(x), plain.gelu_tanh(x)),
        (half.times(x, other), plain.times(x, other)),
        (half.plus(x, other), plain.plus(x, other)),
    ):
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_half_keeps_every_finite_number_of_float16() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    numbers = numbers[torch.isfinite(numbers)]
    half = HalfLinear(numbers[:, None].contiguous(), None)
    for num_rows in (1, 2, 9):
        assert torch.equal(half(torch.ones(num_rows, 1)), numbers.expand(num_rows, -1))


@pytest.mark.parametrize("part", [slice(0, 24), slice(24, 48)])
def test_half_takes_a_part_of_a_larger_weight_and_leaves_it(part: slice) -> None:
    """Gate and up are parts of one matrix."""
    both = _drawn(48, 16).half().float()
    before, x = both.clone(), torch.randn(2, 16)
    torch.testing.assert_close(HalfLinear(both[part], None)(x), x @ before[part].T)
    assert torch.equal(both, before)


@pytest.mark.parametrize("deviation", [1.0, 0.02, 0.003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_fit(dtype: torch.dtype, deviation: float) -> None:
    weight = _drawn(1500, 64, deviation).to(dtype).float()
    assert fits_half(weight)
    assert isinstance(linear(weight, None), HalfLinear)


@pytest.mark.parametrize(
    ("capability", "dtype", "as_half"),
    [
        ("AVX2", torch.bfloat16, True),
        ("AVX2", torch.float16, True),
        ("AVX512", torch.bfloat16, False),
        ("AVX512", torch.float32, True),
    ],
)
def test_half_precision_is_computed_with_as_the_cpu_can(
    capability: str, dtype: torch.dtype, as_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("disagg.kernels.cpu.linear._multiplies_panels", lambda: None)
    chosen = linear(_drawn(16, 8).bfloat16().to(dtype), None)
    assert isinstance(chosen, HalfLinear) == as_half


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_rounds_once_to_the_type_of_its_input(dtype: torch.dtype) -> None:
    weight, bias = _drawn(40, 24).to(dtype), _drawn(1, 40)[0].to(dtype)
    half = HalfLinear(weight, bias)
    x, other = torch.randn(5, 24).to(dtype), torch.randn(5, 40).to(dtype)
    wide = x.float() @ weight.float().T + bias.float()
    for found, expected in (
        (half(x), wide),
        (half.silu(x), functional.silu(wide)),
        (half.times(x, other), wide * other),
        (half.plus(x, other), wide + other),
    ):
        assert found.dtype == dtype
        least = torch.finfo(dtype).eps / 2  # what one rounding is off by
        torch.testing.assert_close(found.float(), expected, rtol=1.01 * least, atol=1e-6)


@pytest.mark.parametrize(
    "weight",
    [
        _drawn(1500, 4096),  # float32's digits
        _drawn(8, 64, 1e-9).bfloat16().float(),  # all below float16's smallest
        torch.full((4, 8), 65520.0),  # above its largest
        torch.full((4, 8), torch.finfo(torch.float32).max),
    ],
)
def test_weights_that_would_lose_do_not_fit(weight: Tensor) -> None:
    before = weight.clone()
    assert not fits_half(weight)
    assert isinstance(linear(weight, None), PackedLinear)
    assert torch.equal(weight, before)


def test_zeros_fit() -> None:
    assert fits_half(torch.zeros(4, 8))


def test_bfloat16_weights_as_halves_are_off_by_what_float32_sums_are() -> None:
    """So small that many of them become subnormal numbers."""
    weight = _drawn(256, 768, 0.003).bfloat16().float()
    assert fits_half(weight)
    assert not torch.equal(weight.half().float(), weight)
    x = torch.randn(64, 768, generator=torch.Generator().manual_seed(3))
    exact = x.double() @ weight.double().T

    for product in (HalfLinear(weight, None), PackedLinear(weight, None)):
        error = float((product(x) - exact).norm() / exact.norm())
        assert error < 1e-6  # rounding to float16 where float32 has digits would make it 2e-4
