"""A tile of a product with a packed weight: what products of one matrix, and of experts, share.

Numbers become the type of the activations by shifts, which is exact. The scales multiply float32
sums, so a product differs from one with the widened weight only by not rounding the weight. e4m3
needs no GPU that knows it. The weight is the first operand, which tensor cores of Hopper take from
registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.packed_sizes import BITS, Kind, part_size

MAX_ROWS = 128  # where groups of warps multiply: on H100 and B200, by their major capability
WARP_GROUPS = 9, 10
# Elsewhere there are fewer registers for a tile and less shared memory, and so there are for many
# small groups. Of taller tiles of int4, Triton 3.7 makes a program without instructions for a B200.
MAX_ROWS_OF_WARPS = 64
FEW_WARPS_ROWS = 32


def launch_options(rows: int) -> dict[str, int]:
    """Warps and pipeline depth for a tile of so many rows of `x`."""
    if rows <= FEW_WARPS_ROWS:
        return {"num_warps": 4, "num_stages": 4}
    return {"num_warps": 8, "num_stages": 3}


def max_rows(kind: Kind, group: int | None, major: int) -> int:
    """Of `x` in a tile."""
    is_cut = group is not None and group <= part_size(kind, group)
    if major not in WARP_GROUPS or (kind == "int4" and (is_cut or major == WARP_GROUPS[1])):
        return MAX_ROWS_OF_WARPS
    return MAX_ROWS


def format_constants(kind: Kind, group: int | None, *, has_zeros: bool) -> dict[str, Any]:
    """What `packed_tile` is told of a matrix."""
    part, num_parts = part_size(kind, group), 16 // BITS[kind]
    return {
        "BITS": BITS[kind],
        "IS_FLOAT": kind == "fp8",
        "PART": part,
        "GROUP": group or 0,
        "TOGETHER": min(group // part, num_parts) if group else num_parts,
        "HAS_ZEROS": has_zeros,
    }


def constants_of(weight: PackedMatrix) -> dict[str, Any]:
    return format_constants(weight.kind, weight.group, has_zeros=weight.zeros is not None)


@triton.jit
def numbers_of(
    units, part: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr
):
    """Part `part` of units as DTYPE: numbers of 8 bits as they are, of 4 bits by `base_of` more."""
    if BITS == 4:
        # 0x4300 is bfloat16's 128, 0x6400 float16's 1024: the last bit of the fraction counts 1.
        bits = (units >> (4 * part)) & 15
        if tl.bfloat16 == DTYPE:
            return (bits | 0x4300).to(tl.bfloat16, bitcast=True)
        return (bits | 0x6400).to(tl.float16, bitcast=True).to(DTYPE)
    elif IS_FLOAT:
        # e4m3's exponent and digits, where DTYPE has its own, count from another exponent.
        if part == 0:
            sign, rest = (units << 8) & -32768, units << 4
        else:
            sign, rest = units & -32768, units >> 4
        if tl.bfloat16 == DTYPE:
            return (sign | (rest & 0x07F0)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
        half = sign | ((rest << 3) & 0x3F80)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:
        return (units >> (8 * part)).to(tl.int8).to(DTYPE)


@triton.jit
def base_of(zero, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """What `numbers_of` is too much, for a zero: all are whole numbers that DTYPE has."""
    if BITS == 8:
        return zero.to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        return (zero.to(tl.int32) + 136).to(DTYPE)
    else:
        return (zero.to(tl.int32) + 1032).to(DTYPE)


@triton.jit
def packed_tile(
    x_ptrs,
    is_row,
    units_ptr,
    scales_ptr,
    zeros_ptr,
    own,
    num_out,
    num_in,
    num_chunks,
    first_chunk,
    end_chunk,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some rows of W times x^T, summed over some chunks of their columns: float32 [WIDTH, ROWS].

    Args:
        x_ptrs: to the first columns of rows of x, [ROWS, 1].
        is_row: whether they exist, [ROWS, 1].
        own: int32 [WIDTH], rows of W; all exist.
        num_out, num_in: of W, whose rows have `num_chunks` chunks.
        GROUP: numbers that share a scale; 0: all of a row.
        TOGETHER: parts of a chunk that share a scale.
    """
    PARTS: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = PARTS * PART
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    depth = tl.arange(0, PART)
    unit_ptrs = units_ptr + own.to(tl.int64)[:, None] * (num_chunks * PART) + depth[None, :]
    acc = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
    if HAS_ZEROS and GROUP == 0:
        base = base_of(tl.load(zeros_ptr + own), BITS, DTYPE)[:, None]
    for chunk in range(first_chunk, end_chunk):
        units = tl.load(unit_ptrs + chunk * PART)
        for begin in tl.static_range(0, PARTS, TOGETHER):
            if GROUP:
                # Of a chunk that is filled up, the last groups may not exist, nor columns of x.
                group = (chunk * CHUNK + begin * PART) // GROUP
                places = tl.minimum(group, (num_in - 1) // GROUP) * num_out + own
                scale = tl.load(scales_ptr + places).to(tl.float32)
                if HAS_ZEROS:
                    base = base_of(tl.load(zeros_ptr + places), BITS, DTYPE)[:, None]
                sums = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
            else:
                sums = acc
            for part in tl.static_range(begin, begin + TOGETHER):
                at = (chunk * CHUNK + part * PART + depth)[None, :]
                x = tl.load(x_ptrs + at, mask=is_row & (at < num_in), other=0.0)
                w = numbers_of(units, part, BITS, IS_FLOAT, DTYPE)
                if HAS_ZEROS:
                    w -= base
                elif BITS == 4:
                    w -= 136.0 if tl.bfloat16 == DTYPE else 1032.0
                sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
            if GROUP:
                acc += sums * scale[:, None]
            else:
                acc = sums
    if GROUP == 0:
        acc *= tl.load(scales_ptr + own).to(tl.float32)[:, None]
    return acc
