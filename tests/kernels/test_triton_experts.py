"""The kernels of experts compile, keep to registers, and fit into shared memory.

For one architecture; `grid/` has all sizes and architectures.
"""

from __future__ import annotations

import pytest

from disagg.kernels.gpu.experts import MAX_ROWS, MIN_ROWS
from tests.kernels.compiling import Assembler
from tests.kernels.compiling_experts import (
    DEEPSEEK_V3_OF_8,
    GPT_OSS,
    QWEN3,
    QWEN3_235B,
    check_products,
    check_routing,
    check_sums,
)
from tests.kernels.compiling_packed import FORMATS

SM = 90  # H100 and H200


@pytest.mark.parametrize(
    ("model", "rows", "packed"),
    [
        (QWEN3, MAX_ROWS, ""),
        (GPT_OSS, MIN_ROWS, ""),
        (QWEN3_235B, MAX_ROWS, "fp8 blocks"),
        (DEEPSEEK_V3_OF_8, MAX_ROWS, "fp8 blocks"),
    ],
)
def test_products_compile(
    model: tuple[int, int, int, int], rows: int, packed: str, assembler: Assembler
) -> None:
    check_products(assembler, model, rows, SM, FORMATS[packed] if packed else None)


def test_sums_of_a_ranks_experts_compile_without_spills(assembler: Assembler) -> None:
    check_sums(assembler, SM)


def test_routing_compiles_without_spills(assembler: Assembler) -> None:
    check_routing(assembler, SM)
