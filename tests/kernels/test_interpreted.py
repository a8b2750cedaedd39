"""Triton kernels without a GPU: their values through Triton's interpreter.

The interpreter is chosen when Triton is imported, so one process runs all these files. That kernels
compile is tested beside it: `test_triton.py` and others, and `grid/`.
"""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import run_interpreted

FILES = [
    "tests/kernels/interpreted_adapters.py",
    "tests/kernels/interpreted_cases.py",
    "tests/kernels/interpreted_delta_net.py",
    "tests/kernels/interpreted_experts.py",
    "tests/kernels/interpreted_latent.py",
    "tests/kernels/interpreted_packed.py",
    "tests/kernels/interpreted_sampling.py",
    "tests/kernels/interpreted_attention_work.py",
    "tests/kernels/interpreted_step_arrays.py",
    "tests/engine/interpreted_graphs.py",
]


@pytest.mark.timeout(900)
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    run_interpreted(*FILES)
