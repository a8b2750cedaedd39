"""Products of bfloat16 on CPUs without bf16 instructions. Collected where they can be run."""

from __future__ import annotations

import ctypes

import pytest
import torch

from disagg.kernels.cpu.linear import PanelLinear, linear
from tests.kernels.compiled import compiled, plain_steps_here


@pytest.fixture(params=plain_steps_here(), ids=lambda library: library.file.stem)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    loaded = compiled(request.param, tmp_path_factory.getbasetemp() / "compiled").loaded
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("num_rows", [0, 1, 7, 16, 17, 121])
@pytest.mark.parametrize(("num_in", "num_out"), [(2, 1), (24, 40), (64, 64), (514, 2065)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_panels_equal_exact_products(
    num_in: int, num_out: int, with_bias: bool, num_rows: int, library: ctypes.CDLL
) -> None:
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).bfloat16()
    bias = torch.randn(num_out).bfloat16() if with_bias else None
    x, other = torch.randn(num_rows, num_in).bfloat16(), torch.randn(num_rows, num_out).bfloat16()
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    panels = PanelLinear(weight, bias, library)
    for found, expected in (
        (panels(x), exact),
        (panels(x.t().contiguous().t()), exact),
        (panels.silu(x), torch.nn.functional.silu(exact)),
        (panels.gelu_tanh(x), torch.nn.functional.gelu(exact, approximate="tanh")),
        (panels.times(x, other), exact * other.double()),
        (panels.plus(x, other), exact + other.double()),
    ):
        assert found.shape == expected.shape and found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(panels(x).double(), exact, rtol=2**-8, atol=1e-5)


def test_a_result_does_not_depend_on_the_other_rows(library: ctypes.CDLL) -> None:
    panels = PanelLinear(torch.randn(70, 100).bfloat16(), None, library)
    x = torch.randn(40, 100).bfloat16()
    assert torch.equal(panels(x), torch.cat([panels(row[None]) for row in x]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.0e38, 1e-39])
def test_numbers_that_are_not_usual_stay_what_they_are(value: float, library: ctypes.CDLL) -> None:
    """One times a number is that number: rounding to bfloat16 makes no NaN an infinity."""
    number = torch.tensor([[value, 0.0]]).bfloat16()
    one = torch.tensor([[1.0, 0.0]]).bfloat16()
    found = PanelLinear(one, None, library)(number)
    torch.testing.assert_close(found, number[:, :1], rtol=0, atol=0, equal_nan=True)


def test_only_a_weight_of_whole_pairs_is_laid_in_panels(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.kernels.cpu.linear._multiplies_panels", lambda: library)
    assert isinstance(linear(torch.zeros(4, 6).bfloat16(), None), PanelLinear)
    odd = linear(torch.zeros(4, 7).bfloat16(), None)
    assert not isinstance(odd, PanelLinear)
