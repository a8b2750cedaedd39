"""Triton kernels without a GPU: code through the compiler; values in `test_interpreted.py`.

For one architecture, each kernel with each format of KV. `grid/` has all sizes and architectures.
"""

from __future__ import annotations

from typing import Any

import pytest

from disagg.kernels import kv_write
from tests.kernels.compiling import (
    OTHERS,
    Assembler,
    check_attention,
    check_cut,
    check_latent_attention,
    check_mixed_cut,
    check_without_spills,
    compile_for,
    page_constants,
)

SM = 90  # H100 and H200
CAP = 72.13  # 50 in base 2
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
        ("bf16", 64, 256, 0, 0.0),
        ("int8", 16, 256, 0, CAP),
        ("bf16", 128, 128, 0, CAP),
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


def test_the_cut_of_decodes_compiles(assembler: Assembler) -> None:
    check_cut(assembler, SM, window=4096, num_seqs=512)


def test_the_cut_of_prompts_and_drafts_compiles(assembler: Assembler) -> None:
    check_mixed_cut(assembler, SM, window=4096)


@pytest.mark.parametrize(
    ("kernel", "constants", "stored"),
    OTHERS,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kernels_compile_without_spills(
    kernel: Any, constants: dict[str, Any], stored: str, assembler: Assembler
) -> None:
    check_without_spills(assembler, SM, kernel, constants, stored)
