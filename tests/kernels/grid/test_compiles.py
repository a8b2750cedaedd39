"""Every kernel of Triton, compiled in all its sizes for all architectures: minutes of a processor.

A part of `make test-bench`; a representative of each kernel is in `make test`.
"""

from __future__ import annotations

from typing import Any

import pytest

from disagg.kernels.gpu.experts import MIN_ROWS, max_rows
from disagg.kernels.gpu.packed_tile import FEW_WARPS_ROWS
from disagg.kernels.gpu.packed_tile import max_rows as packed_max_rows
from tests.kernels.compiling import (
    CAP,
    OTHERS,
    SHARED_NBYTES,
    STORED,
    Assembler,
    check_attention,
    check_cut,
    check_latent_attention,
    check_without_spills,
)
from tests.kernels.compiling_experts import (
    DEEPSEEK_V3,
    GPT_OSS,
    QWEN3,
    QWEN3_235B,
    check_products,
    check_routing,
    check_sums,
)
from tests.kernels.compiling_packed import FORMATS, check_adding, check_packed
from tests.kernels.compiling_sampling import KERNELS, check_sampling, check_step_arrays

ARCHES = sorted(SHARED_NBYTES)
FEW_FORMATS = ("fp8 blocks", "int8 rows", "int4 groups of 32 with zeros")
SHAPES = [  # rows, head_dim, block_size, window
    (16, 64, 16, 0),
    (16, 128, 64, 0),
    (16, 128, 16, 4096),
    (64, 128, 64, 0),
    (128, 64, 64, 4096),
    (128, 128, 64, 0),
    (128, 128, 16, 0),
]
FEW_SHAPES = [(16, 128, 64, 0), (16, 64, 16, 4096), (128, 128, 64, 0)]
WIDE_SHAPES = [(16, 256, 64, 0), (64, 256, 64, 4096)]
ATTENTION = [
    *((arch, "bf16", *shape) for arch in (90, 100) for shape in WIDE_SHAPES),
    (80, "bf16", *WIDE_SHAPES[0]),
    *((90, "bf16", *shape) for shape in SHAPES),
    *((90, stored, *shape) for stored in ("int8", "int4", "fp8") for shape in FEW_SHAPES),
    *((100, stored, *shape) for stored in STORED for shape in FEW_SHAPES[::2]),
    *((80, stored, *shape) for stored in ("bf16", "int8", "int4") for shape in FEW_SHAPES[::2]),
    # The least shared memory: the tallest tiles, with and without a page for each tile of keys.
    *((arch, "bf16", *shape) for arch in (89, 120) for shape in SHAPES[2:]),
    *((arch, stored, *FEW_SHAPES[-1]) for arch in (89, 120) for stored in ("int8", "int4", "fp8")),
]


@pytest.mark.parametrize(("arch", "stored", "rows", "head_dim", "block_size", "window"), ATTENTION)
def test_attention(
    arch: int,
    stored: str,
    rows: int,
    head_dim: int,
    block_size: int,
    window: int,
    assembler: Assembler,
) -> None:
    check_attention(assembler, arch, stored, rows, head_dim, block_size, window)


@pytest.mark.parametrize(("rows", "head_dim"), [(64, 256), (128, 128)])
@pytest.mark.parametrize("arch", [90, 100])
def test_attention_with_a_cap(arch: int, rows: int, head_dim: int, assembler: Assembler) -> None:
    check_attention(assembler, arch, "bf16", rows, head_dim, 64, 0, CAP)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("rows", "block_size"), [(16, 64), (16, 16), (32, 64), (64, 64), (64, 16)])
def test_latent_attention(rows: int, block_size: int, arch: int, assembler: Assembler) -> None:
    check_latent_attention(assembler, arch, rows, block_size)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("is_long", [False, True])
def test_the_cut(is_long: bool, window: int, arch: int, assembler: Assembler) -> None:
    check_cut(assembler, arch, window, is_long=is_long)


@pytest.mark.parametrize(
    ("arch", "kernel", "constants", "stored"),
    [
        (arch, *other)
        for arch in ARCHES
        for other in OTHERS
        if (arch, other[2]) != (80, "fp8")  # refused: `test_e4m3_needs_an_sm_89`
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kernels(
    arch: int, kernel: Any, constants: dict[str, Any], stored: str, assembler: Assembler
) -> None:
    check_without_spills(assembler, arch, kernel, constants, stored)


@pytest.mark.parametrize(
    ("model", "rows", "arch"),
    [
        (QWEN3, MIN_ROWS, 90),
        (QWEN3, max_rows(False, 9), 90),
        (GPT_OSS, MIN_ROWS, 90),
        (GPT_OSS, max_rows(True, 9), 90),
        (QWEN3, max_rows(False, 8), 80),
        (GPT_OSS, max_rows(True, 8), 80),
        (QWEN3, max_rows(False, 10), 100),
        (GPT_OSS, MIN_ROWS, 100),
        (QWEN3, 64, 89),  # these have more stages than taller tiles, and the most shared memory
        (GPT_OSS, max_rows(True, 8), 89),
        (QWEN3, 64, 120),
        (GPT_OSS, max_rows(True, 12), 120),
    ],
)
def test_products_of_experts(
    model: tuple[int, int, int, int], rows: int, arch: int, assembler: Assembler
) -> None:
    check_products(assembler, model, rows, arch)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, arch) for arch in (90, 100) for name in FORMATS),
        *((name, arch) for arch in (80, 89, 120) for name in FEW_FORMATS),
    ],
)
@pytest.mark.parametrize("is_tall", [False, True])
def test_products_of_packed_experts(
    name: str, arch: int, is_tall: bool, assembler: Assembler
) -> None:
    format = FORMATS[name]
    most = packed_max_rows(format.kind, format.group or None, arch // 10)
    check_products(assembler, QWEN3_235B, most if is_tall else MIN_ROWS, arch, format)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("is_tall", [False, True])
def test_products_of_deepseeks_experts(is_tall: bool, arch: int, assembler: Assembler) -> None:
    format = FORMATS["fp8 blocks"]
    most = packed_max_rows(format.kind, format.group or None, arch // 10)
    check_products(assembler, DEEPSEEK_V3, most if is_tall else MIN_ROWS, arch, format)


@pytest.mark.parametrize("arch", [89, 120])
@pytest.mark.parametrize("name", FEW_FORMATS)
def test_products_of_packed_experts_with_most_stages(
    name: str, arch: int, assembler: Assembler
) -> None:
    """The tallest of these tiles take the most shared memory, and these GPUs have the least."""
    check_products(assembler, QWEN3_235B, FEW_WARPS_ROWS, arch, FORMATS[name])


@pytest.mark.parametrize("arch", ARCHES)
def test_routing(arch: int, assembler: Assembler) -> None:
    check_routing(assembler, arch)
    check_sums(assembler, arch)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, arch) for arch in (90, 100) for name in FORMATS),
        *((name, arch) for arch in (80, 89, 120) for name in FEW_FORMATS),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 32, 4096])
def test_products_of_packed_weights(
    name: str, num_rows: int, arch: int, assembler: Assembler
) -> None:
    check_packed(assembler, FORMATS[name], num_rows, arch, is_split=num_rows <= 32)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_sum_of_splits(arch: int, assembler: Assembler) -> None:
    check_adding(assembler, arch)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "absent"), KERNELS)
def test_sampling(name: str, absent: str, arch: int) -> None:
    check_sampling(name, absent, arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_step_arrays(arch: int) -> None:
    check_step_arrays(arch)
