"""Compiles the kernels that choose tokens and make a step's inputs, for GPUs that are not here."""

from __future__ import annotations

from typing import Any

from disagg.kernels.gpu import floors as triton_floors
from disagg.kernels.gpu import sampling as triton_sampling
from disagg.kernels.gpu.step_arrays import _fill_kernel
from tests.kernels.compiling import compile_with

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
# Names of kernels, each with the argument that is not there, or none.
KERNELS = [(name, "") for name in ("adjust", *FLOORS, "remember", "score", "pick")]
WITHOUT_FLOORS = [(name, "floors_ptr") for name in ("score", "pick")]  # a part of these
NARROW = {"tables_ptr", "query_start_ptr", "context_lens_ptr"}


def check_sampling(name: str, absent: str, arch: int) -> None:
    module = triton_floors if name in FLOORS else triton_sampling
    kernel: Any = getattr(module, f"_{name}_kernel")
    constants: dict[str, Any] = {k: v for k, v in LARGE.items() if k in kernel.arg_names}
    if absent:
        constants[absent] = None
    options = {"num_warps": 8 if name == "floors" else 4}
    compiled = compile_with(
        kernel, arch, constants, lambda each: POINTERS.get(each, "i32"), lambda _: False, **options
    )
    assert compiled.asm["cubin"]


def check_step_arrays(arch: int) -> None:
    def type_of(name: str) -> str:
        return "*i32" if name in NARROW else "*i64" if name.endswith("_ptr") else "i32"

    made = compile_with(_fill_kernel, arch, {"BLOCK": 128}, type_of, lambda _: False)
    assert made.asm["cubin"]
