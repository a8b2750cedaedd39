"""Compiles products with packed weights for GPUs that need not be here, and checks the code."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from disagg.kernels.gpu import eight_bit_tile, packed_linear
from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.packed_linear import BAND, tile_sizes
from disagg.kernels.gpu.packed_tile import TileFormat, launch_options, max_rows
from disagg.kernels.packed_matrix import LARGEST
from disagg.kernels.packed_sizes import FP4_KINDS, MXFP4_GROUP, NVFP4_GROUP, Kind
from tests.kernels.compiling import Assembler, check_product, compile_with, is_pointer


class Format(NamedTuple):
    """As a checkpoint has it; `group` 0: a scale for each row.

    in_8_bits: whether it multiplies numbers of 8 bits.
    """

    kind: Kind
    group: int = 0
    has_zeros: bool = False
    in_8_bits: bool = False

    def constants(self) -> dict[str, Any]:
        absent = () if self.kind == "nvfp4" else ("row_scales_ptr",)
        return {"FORMAT": TileFormat.of(self.kind, self.group or None), **dict.fromkeys(absent)}

    @property
    def types(self) -> dict[str, str]:
        """Those of scales, where they are not the activations'."""
        scales = {"scales_ptr": "*i32"} if self.kind in FP4_KINDS else {}
        return {"zeros_ptr": "*i8", "row_scales_ptr": "*fp32", **scales}

    @property
    def number(self) -> str:
        """The type of numbers in 8 bits."""
        return "*fp8e4nv" if self.kind == "fp8" else "*i8"


FORMATS = {
    "fp8 rows": Format("fp8"),
    "fp8 blocks": Format("fp8", 128),
    "int8 rows": Format("int8"),
    "int8 groups with zeros": Format("int8", 128, True),
    "int8 groups of 32": Format("int8", 32),
    "int4 rows with zeros": Format("int4", 0, True),
    "int4 groups of 64": Format("int4", 64),
    "int4 groups of 128": Format("int4", 128),
    "int4 groups of 128 with zeros": Format("int4", 128, True),
    "int4 groups of 32 with zeros": Format("int4", 32, True),
    "mxfp4": Format("mxfp4", MXFP4_GROUP),
    "nvfp4": Format("nvfp4", NVFP4_GROUP),
}
IN_8_BITS = {
    f"{name} in 8 bits": FORMATS[name]._replace(in_8_bits=True)
    for name in ("fp8 rows", "fp8 blocks", "int8 rows")
}
FORMATS |= IN_8_BITS
SIZES = ("num_rows", "num_out", "num_in", "num_chunks", "num_own_chunks")


def compile_product(format: Format, num_rows: int, arch: int, *, is_split: bool = False) -> Any:
    """With bfloat16 activations; `is_split` as steps of few rows have it."""
    most = max_rows(format.kind, format.group or None, arch // 10)
    rows, width = tile_sizes(num_rows, most)
    constants: dict[str, Any] = {
        **format.constants(),
        "ROWS": rows,
        "WIDTH": width,
        "BAND": BAND,
        "IS_SPLIT": is_split,
        "bias_ptr": None,
    }
    if not format.has_zeros:
        constants["zeros_ptr"] = None
    types = {"units_ptr": "*i16", **format.types, **dict.fromkeys(SIZES, "i32")}
    types |= {"out_ptr": "*fp32"} if is_split else {}
    if format.in_8_bits:
        number = format.number
        types |= {"x_ptr": number, "units_ptr": number, "x_scales_ptr": "*fp32"}
    else:
        constants["x_scales_ptr"] = None

    def is_aligned(name: str) -> bool:
        return is_pointer(name) or name in ("num_out", "num_in")

    kernel, options = packed_linear._packed_linear_kernel, launch_options(rows)
    return compile_with(
        kernel, arch, constants, lambda name: types.get(name, "*bf16"), is_aligned, **options
    )


def check_packed(
    assembler: Assembler, format: Format, num_rows: int, arch: int, *, is_split: bool = False
) -> None:
    """It keeps to registers, fits into shared memory, and uses the tensor cores."""
    compiled = compile_product(format, num_rows, arch, is_split=is_split)
    check_product(assembler, compiled, arch)
    ptx = compiled.asm["ptx"]
    if format.in_8_bits:  # both operands as they are stored
        assert re.search(r"(wgmma|mma)\S*(e4m3|s8)|kind::(f8f6f4|i8)", ptx)
        return
    # What was stored comes into registers in units, and e4m3 without a GPU that knows it.
    if not format.has_zeros:  # which are bytes, one for each row of the weight
        assert not re.search(r"ld\.shared(\.v\d)?\.[bus]8", ptx)
    assert "e4m3" not in ptx


def check_quantizing(assembler: Assembler, format: Format, arch: int) -> None:
    """Of rows of Llama-3-70B's widest matrix."""
    size = 28672
    group = format.group or next_power_of_2(size)
    constants: dict[str, Any] = {
        "SIZE": size,
        "PADDED": size,
        "GROUP": group,
        "GROUPS": next_power_of_2(-(-size // group)),
        "LARGEST": LARGEST[format.kind],
        "IS_STATIC": False,
    }
    types = {"numbers_ptr": format.number, "scales_ptr": "*fp32", "static_scale": "fp32"}
    kernel, num_warps = eight_bit_tile._quantize_rows_kernel, eight_bit_tile.quantizing_warps(size)
    compile_with(
        kernel, arch, constants, lambda name: types.get(name, "*bf16"), is_pointer,
        num_warps=num_warps,
    )  # fmt: skip
    assert assembler()[1] == 0


def check_adding(assembler: Assembler, arch: int) -> None:
    kernel = packed_linear._add_splits_kernel
    constants: dict[str, Any] = {
        "bias_ptr": None,
        "SPLITS": packed_linear.MOST_SPLITS,
        "BLOCK": packed_linear._BLOCK,
    }
    types = {"partial_ptr": "*fp32", "out_ptr": "*bf16"}
    compile_with(
        kernel, arch, constants, lambda name: types.get(name, "i32"), is_pointer, num_warps=4
    )
    assert assembler()[1] == 0
