"""The kernel that makes a step of decodes: values by the interpreter, code by the compiler."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.kernels.decode_inputs import _fill_kernel
from tests.kernels.interpreter import run_interpreted

NARROW = {"tables_ptr", "context_lens_ptr", "block_tables_ptr"}


@pytest.mark.timeout(600)
def test_one_launch_makes_the_batch_that_torch_makes() -> None:
    run_interpreted("tests/kernels/interpreted_decode_inputs.py")


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_it_compiles(arch: int) -> None:
    signature = {
        name: "*i32" if name in NARROW else "*i64" if name.endswith("_ptr") else "i32"
        for name in _fill_kernel.arg_names
    }
    source = ASTSource(_fill_kernel, {**signature, "BLOCK": "constexpr"}, {"BLOCK": 128}, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert compiled.asm["cubin"]
