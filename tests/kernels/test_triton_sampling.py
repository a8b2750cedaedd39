"""The kernels that choose tokens: values by the interpreter, code by the compiler; no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.kernels import triton_floors, triton_sampling
from tests.kernels.interpreter import run_interpreted

POINTERS = {
    **dict.fromkeys(("numbers_ptr", "slots_ptr", "rows_ptr", "positions_ptr"), "*i64"),
    **dict.fromkeys(("token_ids_ptr", "bounds_ptr"), "*i64"),
    **dict.fromkeys(("stop_ids_ptr", "seen_ids_ptr", "num_seen_ptr", "counts_ptr"), "*i32"),
    "chosen_ptr": "*i32",
    **dict.fromkeys(("logits_ptr", "peaks_ptr", "sums_ptr", "floors_ptr"), "*fp32"),
    **dict.fromkeys(("scores_ptr", "totals_ptr"), "*fp64"),
}
FLOORS = ("groups", "select", "floors")
LARGE = {"BLOCK": 1024, "TILE": 8, "STOPS": 8}  # 262,144 tokens


@pytest.mark.timeout(600)
def test_kernels_equal_their_twin_under_the_interpreter() -> None:
    run_interpreted("tests/kernels/interpreted_sampling.py")


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "absent"),
    [
        *((name, "") for name in ("adjust", *FLOORS, "remember")),
        *((name, absent) for name in ("score", "pick") for absent in ("", "floors_ptr")),
    ],
)
def test_kernels_compile(name: str, absent: str, arch: int) -> None:
    module = triton_floors if name in FLOORS else triton_sampling
    kernel: Any = getattr(module, f"_{name}_kernel")
    constants: dict[str, Any] = {k: v for k, v in LARGE.items() if k in kernel.arg_names}
    if absent:
        constants[absent] = None
    signature = {
        each: "constexpr" if each in constants else POINTERS.get(each, "i32")
        for each in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants, {})
    options = {"num_warps": 8 if name == "floors" else 4}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.asm["cubin"]
