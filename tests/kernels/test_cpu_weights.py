"""Products with each kind of weight that a CPU keeps, by torch and by each compiled library, are
those of the numbers that are kept; and these are as near to the weight as they can be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu import narrow_linear
from disagg.kernels.cpu.library import Found, Library
from disagg.kernels.cpu.linear import (
    ROWS_AT_ONCE,
    OnednnLinear,
    PanelLinear,
    PlainLinear,
    linear,
)
from disagg.kernels.cpu.narrow_linear import (
    LARGEST,
    NarrowLinear,
    int4_linear,
    int8_linear,
    packed_linear,
)
from disagg.kernels.cpu.panels import FEW_ROWS, PANEL, CpuMatrix, multiply_rows
from disagg.kernels.packed_matrix import PackedMatrix
from tests.grids import pairs
from tests.kernels.compiled import can_compile, loaded, plain_steps_here, steps_here
from tests.kernels.packed_cases import random_packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = steps_here() if can_compile() else []
PLAIN_STEPS = plain_steps_here() if can_compile() else []


def random_values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _laid_in_panels_by_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_linear, "find_step", lambda: Found(None, ""))


# Numbers of checkpoints: a kind, a size of their groups (None: a row), zeros, least values.
PACKED: dict[str, tuple[Any, int | None, bool, bool]] = {
    "Q4_1": ("int4", 32, False, True),
    "Q4_0": ("int4", 32, False, False),
    "AWQ": ("int4", 128, True, False),
    "int4 in groups of 16": ("int4", 16, True, False),
    "int4 rows": ("int4", None, True, False),
    "Q8_0": ("int8", 32, False, False),
    "int8 in groups of 128": ("int8", 128, False, False),
    "int8 rows": ("int8", None, False, False),
}
QUANTIZERS: dict[str, Callable[[Tensor, Tensor | None], NarrowLinear]] = {
    "int8": int8_linear,
    "int4": int4_linear,
}
# Of 4-bit numbers, compiled code reads rows of a multiple of 8.
SHAPES = [(64, 64), (96, 32), (7, 48), (130, 992), (70, 8), (1, 200), (130, 328)]
TORCH_SHAPES = [(96, 33), (130, 1000), (1, 5), (1200, 40)]


def packed_matrix(
    name: str, num_out: int, num_in: int, dtype: torch.dtype = torch.float16
) -> PackedMatrix:
    kind, group, zeros, least = PACKED[name]
    torch.manual_seed(num_out)
    return random_packed(
        kind, num_out, num_in, group, has_zeros=zeros, has_least=least, dtype=dtype
    )


def _narrow(name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor) -> NarrowLinear:
    if name in QUANTIZERS:
        return QUANTIZERS[name](random_values(*shape).to(dtype), bias)
    return packed_linear(packed_matrix(name, *shape), bias, dtype)


def _unpacked(kept: NarrowLinear) -> Tensor:
    if kept.bits == 8:
        return kept.numbers
    return torch.stack((kept.numbers & 15, kept.numbers >> 4), 2).flatten(1)[:, : kept.num_in]


def _exact(kept: NarrowLinear) -> Tensor:
    """W in double, from the numbers and scales as they are kept."""
    groups = torch.arange(kept.num_in) // (kept.group or kept.num_in)
    scales = kept.scales.double()
    values = _unpacked(kept) * scales[:, groups, 0]
    return values if kept.bits == 8 else values + scales[:, groups, 1]


def _check_norm(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Widened in half precision, a weight is rounded once more than what torch multiplies."""
    assert found.dtype == dtype and found.shape == wanted.shape
    most = max(4 * torch.finfo(dtype).eps, 3e-6)
    assert (found.double() - wanted).norm() <= most * max(1.0, float(wanted.norm()))


KEPT = [*QUANTIZERS, *PACKED]
NUMS_ROWS = [0, 1, 7, 70]


@pytest.mark.parametrize(
    ("way", "shape", "name", "num_rows"),
    [  # by torch, and by each compiled step that is tested on this CPU
        *pairs([(None, dtype) for dtype in DTYPES], SHAPES + TORCH_SHAPES, KEPT, NUMS_ROWS),
        *(
            ((step, torch.bfloat16), *each)
            for step in STEPS
            for each in pairs(SHAPES, KEPT, NUMS_ROWS)
        ),
    ],
)
def test_products_are_those_of_the_numbers(
    way: tuple[Library | None, torch.dtype], shape: tuple[int, int], name: str, num_rows: int
) -> None:
    """In double, of the numbers and scales themselves: nothing is rounded but sums and results."""
    library, dtype = way
    place = None if library is None else loaded(library)
    bias = random_values(shape[0], seed=2).to(dtype)
    kept = _narrow(name, shape, dtype, bias)
    exact, whole = _exact(kept), kept.widened()
    ids = torch.arange(shape[0] - 1, -1, -1)
    assert torch.equal(kept.rows(ids), whole[ids])
    if place is not None:
        kept.lay_in_panels(place)
        assert torch.equal(kept.widened(), whole) and torch.equal(kept.rows(ids), whole[ids])
    x, other = (random_values(num_rows, n, seed=3).to(dtype) for n in reversed(shape))
    is_widened = _is_widened(kept, num_rows, place)
    values = whole.double() if is_widened or place is None else exact
    twin, wide = PlainLinear(values, bias.double()), x.double()
    _check_norm(kept(x), twin(wide), dtype)
    _check_norm(kept.silu(x), twin.silu(wide), dtype)
    _check_norm(kept.times(x, other), twin.times(wide, other.double()), dtype)
    _check_norm(kept.plus(x, other), twin.plus(wide, other.double()), dtype)
    if place is not None and num_rows:
        _check_compiled(kept, x, values, twin(wide), is_widened=is_widened)


def _is_widened(kept: NarrowLinear, num_rows: int, place: ctypes.CDLL | None) -> bool:
    """Whether AMX or torch multiplies with the weight in bfloat16, in which each value is rounded.

    The scales of whole rows multiply sums.
    """
    if place is None or num_rows <= FEW_ROWS or kept.group is None:
        return False
    return bool(place.disagg_step_has_tiles())


def _check_compiled(
    kept: NarrowLinear, x: Tensor, values: Tensor, wanted: Tensor, *, is_widened: bool
) -> None:
    """Each number, and that a result depends neither on other rows nor on threads."""
    found = kept(x)
    # A half of bfloat16's last digit, and what adding up in float32 loses.
    bound = wanted.abs() * 2.0**-8 + 1e-5 * (x.double().abs() @ values.abs().T)
    if is_widened:  # a value between two others may be rounded to the other one
        bound += 2.0**-8 * x.double().abs().amax(1, True) * values.abs().amax(1)
    if kept.group is None and len(x) > FEW_ROWS:  # torch rounds sums before they are scaled
        bound += 2.0**-6 * wanted.abs().amax()
    assert ((found.double() - wanted).abs() <= bound).all()
    assert torch.equal(kept(torch.cat((x, x), 1)[:, : x.shape[1]]), found)  # rows that are apart
    if kept.group is not None or len(x) <= FEW_ROWS:
        count = FEW_ROWS + 1 if is_widened else 1
        assert torch.equal(kept(x[-count:])[-1], found[-1])


@pytest.mark.parametrize("name", [*QUANTIZERS, "Q8_0"])
@pytest.mark.parametrize("library", STEPS, ids=lambda each: each.file.stem)
def test_threads_change_no_bit(library: Library, name: str) -> None:
    kept = _narrow(name, (1200, 640), torch.bfloat16, random_values(1200, seed=2).bfloat16())
    kept.lay_in_panels(loaded(library))
    x, found = random_values(7, 640, seed=3).bfloat16(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(kept(x))
    assert torch.equal(*found)


@pytest.mark.parametrize(("num_in", "dtype", "name"), pairs([40, 96, 200, 5], DTYPES, QUANTIZERS))
def test_no_value_is_off_by_more_than_half_a_step(
    num_in: int, dtype: torch.dtype, name: str
) -> None:
    """Rows of very unlike sizes keep their digits, of more rows than are quantised at once."""
    weight = (random_values(1500, num_in) * torch.logspace(-2, 2, 1500)[:, None]).to(dtype)
    before = weight.clone()
    kept = QUANTIZERS[name](weight, None)
    assert torch.equal(weight, before) and kept.scales.dtype == dtype
    size = kept.group or num_in
    assert kept.scales.shape == (1500, -(-num_in // size), 2 if name == "int4" else 1)
    numbers = _unpacked(kept)
    assert numbers.shape == weight.shape
    if name == "int8":
        assert numbers.abs().amax(1).eq(LARGEST[8]).all()
    scales = kept.scales.double().repeat_interleave(size, 1)[:, :num_in]
    # The ends of a group may lie outside of what its rounded scale and least value reach.
    reach = LARGEST[kept.bits] * scales[..., 0] + (scales[..., 1:].abs().sum(2))
    rounding = torch.finfo(dtype).eps * reach
    assert ((_exact(kept) - weight.double()).abs() <= scales[..., 0] / 2 + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_equal_numbers_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 256, dtype=dtype)
    weight[1, 128:] = -0.5
    assert torch.equal(int4_linear(weight, None).widened(), weight)
    rows = int8_linear(weight, None).widened()
    assert torch.equal(rows[[0, 2]], weight[[0, 2]])
    assert float(rows[1, 200]) == pytest.approx(-0.5, rel=0.01)


@pytest.mark.parametrize("num_rows", [1, 9])
def test_large_activations_stay_finite(num_rows: int) -> None:
    """Of float16 the largest number is 65,504: 127 times these are more."""
    weight = (random_values(8, 32) / 100).half()
    found = int8_linear(weight, None)((random_values(num_rows, 32) * 1000).half())
    assert found.isfinite().all() and found.abs().max() > 1


@pytest.mark.parametrize("library", STEPS, ids=lambda each: each.file.stem)
def test_where_a_number_of_4_bits_lies_in_a_panel(library: Library) -> None:
    """As csrc/int4.h says, of a weight whose numbers are 0 but for one."""
    for row, column in ((0, 0), (17, 3), (63, 15), (64, 8), (70, 22)):
        weight = torch.zeros(80, 24, dtype=torch.bfloat16)
        weight[row, column], weight[row, (column + 1) % 24] = 15.0, 1.0
        kept = int4_linear(weight, None)
        kept.lay_in_panels(loaded(library))
        panel, vector = row // PANEL, row % PANEL // 16
        words = kept.numbers[panel, column // 8, vector].view(torch.int16)
        word = int(words[2 * (row % 16) + column % 2]) & 0xFFFF
        assert word >> (4 * (column % 8 // 2)) & 15 == 15
        assert kept.scales[panel, 0, :, row % PANEL].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "scales", "name"),
    pairs([(1500, 96), (70, 8), (33, 328), (130, 328)], DTYPES, PACKED),
)
def test_numbers_of_checkpoints_stay_as_they_are(
    shape: tuple[int, int], scales: torch.dtype, name: str
) -> None:
    """In float32 their values, too; in half precision these are off by less than their scale was
    rounded by in the middle of a group, and twice that at its ends."""
    matrix = packed_matrix(name, *shape, scales)
    exact = matrix.widened(torch.float32)
    steps = matrix.scales.float().T.repeat_interleave(matrix.group or matrix.num_in, 1)[
        :, : shape[1]
    ]
    for dtype in DTYPES:
        kept = packed_linear(matrix, None, dtype)
        assert torch.equal(_unpacked(kept), matrix.numbers() + (8 if kept.bits == 4 else 0))
        assert kept.scales.dtype == dtype
        if dtype == scales:
            assert torch.equal(kept.scales[:, :, 0], matrix.scales.T)
        off = (kept.widened().float() - exact).abs()
        lost = torch.finfo(dtype).eps
        tiny = 128 * torch.finfo(dtype).smallest_normal * lost
        if kept.bits == 8:
            is_float32 = dtype == torch.float32
            assert (off <= (0.0 if is_float32 else 1.1 * lost) * exact.abs() + tiny).all()
        elif dtype == torch.float32:
            assert (off <= 2.0**-22 * 31 * steps).all()
        else:  # a scale times up to 15, a least value of up to 31 of them, and the value itself
            assert (off <= lost / 2 * 1.1 * (15 + 31 + 31) * steps + tiny / 8).all()


def test_symmetric_groups_of_bfloat16_lose_nothing() -> None:
    torch.manual_seed(3)
    matrix = random_packed("int4", 40, 256, 128, dtype=torch.bfloat16)
    kept = packed_linear(matrix, None, torch.bfloat16)
    assert torch.equal(kept.widened(), matrix.widened(torch.bfloat16))


def test_a_group_whose_scale_was_rounded_is_off_in_both_directions() -> None:
    torch.manual_seed(4)
    matrix = random_packed("int4", 256, 256, 32, has_least=True, dtype=torch.float16)
    kept = packed_linear(matrix, None, torch.bfloat16)
    off = _exact(kept) - matrix.widened(torch.float64)
    # Of a group only what the least value itself lost, which is at most 15 scales.
    most = kept.scales[:, :, 1].double().abs().flatten() * 2.0**-8
    assert (off.view(-1, 32).mean(1).abs() <= most).all()
    assert off.abs().max() > 0


class FakeLibrary:
    """Computes nothing, and keeps the rows that the compiled program may read."""

    def __init__(self, has_tiles: bool, num_read: int, num_in: int) -> None:
        self._has_tiles, self._nbytes = has_tiles, num_read * num_in * 2
        self.address, self.read, self.status = 0, b"", 0

    def disagg_step_has_tiles(self) -> int:
        return self._has_tiles

    def disagg_step_narrow_rows(self, matrix: Any, x: ctypes.c_void_p, *_: Any) -> int:
        assert x.value is not None
        self.address = x.value
        self.read = ctypes.string_at(x.value, self._nbytes)
        return self.status


@pytest.mark.parametrize(
    ("num_rows", "has_tiles", "num_read"),
    [(16, True, 16), (17, True, 32), (32, True, 32), (17, False, 17)],
)
def test_rows_are_padded_only_if_whole_tiles_are_read(
    num_rows: int, has_tiles: bool, num_read: int
) -> None:
    x = torch.randn(num_rows, 8).bfloat16()
    library = FakeLibrary(has_tiles, num_read, 8)
    multiply_rows(cast(ctypes.CDLL, library), CpuMatrix(num_out=4, num_in=8), x)
    padded = functional.pad(x, (0, 0, 0, num_read - num_rows))
    assert library.read == padded.view(torch.uint8).numpy().tobytes()
    assert (library.address == x.data_ptr()) == (num_read == num_rows)


def test_no_memory_is_an_error() -> None:
    library = FakeLibrary(has_tiles=False, num_read=3, num_in=8)
    library.status = 1
    x = torch.randn(3, 8).bfloat16()
    with pytest.raises(MemoryError, match="a product of 3 rows"):
        multiply_rows(cast(ctypes.CDLL, library), CpuMatrix(num_out=4, num_in=8), x)


# Weights of 16 or 32 bits, and what their products may be off by from those in double.
Wide = Callable[[Tensor, Tensor | None], Any]


def _check_wide(
    make: Wide, shape: tuple[int, int], num_rows: int, dtype: torch.dtype, off: tuple[float, float]
) -> None:
    """All products, also of rows that are not contiguous, and without a bias."""
    weight = (random_values(*shape) * shape[1] ** -0.5).half().to(dtype)
    for bias in (random_values(shape[0], seed=2).to(dtype), None):
        kept = make(weight, bias)
        twin = PlainLinear(weight.double(), None if bias is None else bias.double())
        x, other = (random_values(num_rows, n, seed=3).to(dtype) for n in reversed(shape))
        wide, factor = x.double(), other.double()
        for found, wanted in (
            (kept(x), twin(wide)),
            (kept(x.t().contiguous().t()), twin(wide)),
            (kept.silu(x), twin.silu(wide)),
            (kept.gelu_tanh(x), twin.gelu_tanh(wide)),
            (kept.times(x, other), twin.times(wide, factor)),
            (kept.plus(x, other), twin.plus(wide, factor)),
        ):
            assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
            torch.testing.assert_close(found.double(), wanted, rtol=off[0], atol=off[1])


@pytest.mark.parametrize("num_rows", [0, 1, 7, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("shape", [(40, 24), (1, 1), (3, 7), (17, 513)])
def test_products_of_float32(shape: tuple[int, int], num_rows: int) -> None:
    _check_wide(OnednnLinear, shape, num_rows, torch.float32, (1e-5, 2e-5))


@pytest.fixture(params=PLAIN_STEPS, ids=lambda each: each.file.stem)
def plain_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Of CPUs without bf16 instructions, which multiply bfloat16 weights in panels."""
    return loaded(request.param)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 16, 17, 121])
@pytest.mark.parametrize("shape", [(1, 2), (40, 24), (64, 64), (2065, 514)])
def test_products_of_bfloat16_in_panels(
    shape: tuple[int, int], num_rows: int, plain_library: ctypes.CDLL
) -> None:
    def make(weight: Tensor, bias: Tensor | None) -> PanelLinear:
        return PanelLinear(weight, bias, plain_library)

    _check_wide(make, shape, num_rows, torch.bfloat16, (2**-6, 2**-6))
    weight, x = (random_values(n, shape[1]).bfloat16() for n in (shape[0], num_rows))
    kept = make(weight, None)
    found, wanted = kept(x), x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5 * shape[1] ** 0.5)
    alone = [kept(row[None]) for row in x]
    assert not num_rows or torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.0e38, 1e-39])
def test_numbers_that_are_not_usual_stay_what_they_are(
    value: float, plain_library: ctypes.CDLL
) -> None:
    """One times a number is that number: rounding to bfloat16 makes no NaN an infinity."""
    number = torch.tensor([[value, 0.0]]).bfloat16()
    one = torch.tensor([[1.0, 0.0]]).bfloat16()
    found = PanelLinear(one, None, plain_library)(number)
    torch.testing.assert_close(found, number[:, :1], rtol=0, atol=0, equal_nan=True)


def test_only_a_weight_of_whole_pairs_is_laid_in_panels(
    plain_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.kernels.cpu.linear._multiplies_panels", lambda: plain_library)
    assert isinstance(linear(torch.zeros(4, 6).bfloat16(), None), PanelLinear)
    assert not isinstance(linear(torch.zeros(4, 7).bfloat16(), None), PanelLinear)


def test_prompts_of_all_lengths_need_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    num_out, num_in = 40, 24
    packed = OnednnLinear(random_values(num_out, num_in), None)
    seen: set[int] = set()

    def recorded(x: Tensor, *rest: Any) -> Tensor:
        seen.add(x.shape[0])
        return x.new_zeros(x.shape[0], num_out)

    monkeypatch.setattr(packed, "_unary", recorded)
    monkeypatch.setattr(packed, "_binary", recorded)
    for num_rows in range(ROWS_AT_ONCE, 1025):
        x, other = torch.zeros(num_rows, num_in), torch.zeros(num_rows, num_out)
        assert packed.silu(x).shape[0] == packed.plus(x, other).shape[0] == num_rows
    assert seen == set(range(ROWS_AT_ONCE, 1025, ROWS_AT_ONCE))
