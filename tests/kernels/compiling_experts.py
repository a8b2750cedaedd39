"""Compiles the kernels of experts for GPUs that need not be here, and checks what comes out."""

from __future__ import annotations

from typing import Any

from disagg.kernels.gpu import experts as triton_experts
from disagg.kernels.gpu import held_rows, route
from disagg.kernels.gpu.experts import WIDTH, launch_options
from tests.kernels.compiling import Assembler, check_product, compile_with, is_pointer
from tests.kernels.compiling_packed import FORMATS, Format

INTEGERS = {"order_ptr": "*i64", "starts_ptr": "*i32", "chosen_ptr": "*i32"}
# (experts, experts of a token, hidden, inner): Qwen3-30B-A3B, Qwen3-235B-A22B, gpt-oss and
# DeepSeek-V3
QWEN3, QWEN3_235B, GPT_OSS = (128, 8, 2048, 768), (128, 8, 4096, 1536), (128, 4, 2880, 2880)
DEEPSEEK_V3 = (256, 8, 7168, 2048)
DEEPSEEK_V3_OF_8 = (32, 8, 7168, 2048)  # with whole experts on each of eight ranks


def _compile(
    kernel: Any, arch: int, constants: dict[str, Any], format: Format | None = None, **options: int
) -> Any:
    types = {**INTEGERS, **(format.types if format is not None else {})}
    if format is not None and format.in_8_bits:
        x = "x_ptr" if kernel is triton_experts._gate_up_kernel else "inner_ptr"
        types |= dict.fromkeys((x, "matrix_ptr"), format.number)
        types |= dict.fromkeys(("x_scales_ptr", "inner_scales_ptr"), "*fp32")
    elif constants.get("FORMAT"):
        types["matrix_ptr"] = "*i16"
    if kernel is not triton_experts._gate_up_kernel:
        types["weights_ptr"] = "*fp32"

    def type_of(name: str) -> str:
        return types.get(name, "*bf16" if name.endswith("_ptr") else "fp32")

    return compile_with(kernel, arch, constants, type_of, is_pointer, **options)


def check_products(
    assembler: Assembler,
    model: tuple[int, int, int, int],
    rows: int,
    arch: int,
    format: Format | None = None,
) -> None:
    """They keep to registers, fit into shared memory, and use the tensor cores.

    Args:
        format: of packed matrices; None: they are floats, or gpt-oss has MXFP4.
    """
    num_experts, num_chosen, hidden, inner = model
    is_gpt_oss = model == GPT_OSS
    constants: dict[str, Any] = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": num_experts,
        "HIDDEN": hidden,
        "INNER": inner,
        "ROWS": rows,
        "WIDTH": WIDTH,
        **dict.fromkeys(("FORMAT", "row_scales_ptr")),
    }
    if is_gpt_oss:
        format = FORMATS["mxfp4"]
    if format is not None:
        constants |= format.constants()
    if format is None or not format.has_zeros:
        constants["zeros_ptr"] = None
    if format is None or not format.in_8_bits:
        constants |= {"x_scales_ptr": None, "inner_scales_ptr": None}
    if not is_gpt_oss:
        constants["bias_ptr"] = None
        constants |= {} if format is not None else {"scales_ptr": None}
    for kernel, its in (
        (triton_experts._gate_up_kernel, {"NUM_CHOSEN": num_chosen, "CLAMPED": is_gpt_oss}),
        (triton_experts._down_kernel, {}),
    ):
        options = launch_options(rows, is_packed=format is not None)
        own = {name: value for name, value in constants.items() if name in kernel.arg_names}
        compiled = _compile(kernel, arch, {**own, **its}, format, **options)
        check_product(assembler, compiled, arch)


_BY_GROUPS = {  # of DeepSeek-V3
    "NUM_GROUPS": 8,
    "NUM_CHOSEN_GROUPS": 4,
    "SIZE": 32,
    "NUM_CHOSEN": 8,
    "GROUPS": 8,
    "MEMBERS": 32,
    "CHOSEN": 8,
    "SIGMOID": True,
    "NORMALIZED": True,
    "GROUPED": True,
}
_WITHOUT_GROUPS = {
    **dict.fromkeys(("NUM_GROUPS", "NUM_CHOSEN_GROUPS", "GROUPS"), 1),
    **dict.fromkeys(("SIZE", "MEMBERS"), 128),
    **dict.fromkeys(("SIGMOID", "GROUPED"), False),
    "bias_ptr": None,
}


def check_sums(assembler: Assembler, arch: int) -> None:
    """Of the experts of one of four ranks of Qwen3-30B-A3B."""
    constants = {"FIRST": 32, "END": 64, "NUM_CHOSEN": 8, "HIDDEN": 2048, "WIDTH": 1024}
    _compile(held_rows._sum_held_kernel, arch, constants, num_warps=4)
    assert assembler()[1] == 0


def check_routing(assembler: Assembler, arch: int) -> None:
    for its in (_BY_GROUPS, {**_BY_GROUPS, **_WITHOUT_GROUPS}):
        _compile(route._route_kernel, arch, its, num_warps=1)
        assert assembler()[1] == 0
