"""Triton kernels without a GPU: code through the compiler; values in `test_interpreted.py`.

For one architecture, each kernel with each format of KV. `grid/` has all sizes and architectures.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl

from disagg.kernels.gpu import kv_write
from tests.kernels.compiling import (
    CAP,
    OTHERS,
    Assembler,
    check_attention,
    check_cut,
    check_latent_attention,
    check_without_spills,
    compile_for,
    early_loads,
    page_constants,
)

SM = 90  # H100 and H200
ATTENTION = [  # stored, rows, head_dim, block_size, window
    ("bf16", 128, 128, 64, 0),
    ("bf16", 16, 64, 16, 4096),
    ("int8", 16, 128, 64, 0),
    ("int4", 128, 128, 64, 0),
    ("fp8", 16, 128, 64, 0),
]


@pytest.mark.parametrize(("stored", "rows", "head_dim", "block_size", "window"), ATTENTION)
def test_attention_compiles_and_is_pipelined(
    stored: str, rows: int, head_dim: int, block_size: int, window: int, assembler: Assembler
) -> None:
    check_attention(assembler, SM, stored, rows, head_dim, block_size, window)


@pytest.mark.parametrize(
    ("stored", "rows", "head_dim", "window", "cap"),
    [
        ("bf16", 16, 256, 4096, CAP),
        ("bf16", 64, 256, 0, CAP),
        ("int8", 16, 256, 0, CAP),
    ],
)
def test_attention_with_wide_heads_or_a_cap_compiles(
    stored: str, rows: int, head_dim: int, window: int, cap: float, assembler: Assembler
) -> None:
    """Of Gemma: most have heads of 256, and the scores of Gemma 2 are capped."""
    check_attention(assembler, SM, stored, rows, head_dim, 64, window, cap)


@pytest.mark.parametrize("rows", [16, 64])
def test_latent_attention_compiles(rows: int, assembler: Assembler) -> None:
    check_latent_attention(assembler, SM, rows, block_size=64)


@triton.jit
def _two_products(
    a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, SIZE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    side, depth = tl.arange(0, SIDE), tl.arange(0, DEPTH)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(0, SIZE, DEPTH):
        rows = side[:, None] * SIZE + start + depth[None, :]
        columns = (start + depth)[:, None] * SIDE + side[None, :]
        total = tl.dot(tl.load(a_ptr + rows), tl.load(b_ptr + columns), total)
        total = tl.dot(tl.load(c_ptr + rows), tl.load(d_ptr + columns), total)
    tl.store(out_ptr + side[:, None] * SIDE + side[None, :], total)


def test_sums_that_a_b200_would_read_too_early_are_noticed() -> None:
    """No kernel here has any (`grid/`). This one has, as Triton is before 3.8."""
    sizes = {"SIZE": 4096, "SIDE": 64, "DEPTH": 64}
    compiled = compile_for(_two_products, 100, sizes, num_warps=4, num_stages=3)
    is_mended = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    assert bool(early_loads(compiled)) != is_mended


def test_e4m3_needs_an_sm_89() -> None:
    """Why `choose_format` refuses it on older ones: Triton does, in the middle of a start."""
    constants = {
        "NUM_QUERY_VALUES": 4096,
        "NUM_HEADS": 8,
        "NUM_PAGES": 16,
        "PAGES": 16,
        **page_constants("fp8", 64, 128),
    }
    with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
        compile_for(kv_write._kv_write_kernel, 80, constants, "fp8", num_warps=4)


@pytest.mark.parametrize("is_long", [False, True])
def test_the_cut_compiles(is_long: bool, assembler: Assembler) -> None:
    check_cut(assembler, SM, window=4096, is_long=is_long)


@pytest.mark.parametrize(
    ("kernel", "constants", "stored"),
    OTHERS,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kernels_compile_without_spills(
    kernel: Any, constants: dict[str, Any], stored: str, assembler: Assembler
) -> None:
    check_without_spills(assembler, SM, kernel, constants, stored)
