"""Products with packed weights compile, keep to registers, and fit into shared memory.

For one architecture; `grid/` has all formats, sizes and architectures.
"""

from __future__ import annotations

import pytest

from tests.kernels.compiling import Assembler
from tests.kernels.compiling_packed import FORMATS, check_adding, check_packed

SM = 90  # H100 and H200


@pytest.mark.parametrize(
    ("name", "num_rows"), [("fp8 blocks", 512), ("int4 groups of 128 with zeros", 4)]
)
def test_products_compile(name: str, num_rows: int, assembler: Assembler) -> None:
    check_packed(assembler, FORMATS[name], num_rows, SM, is_split=num_rows < 512)


def test_the_sum_of_splits_compiles_without_spills(assembler: Assembler) -> None:
    check_adding(assembler, SM)
