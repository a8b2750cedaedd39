"""A tile of a product with a packed weight, used for single matrices and for experts.

Shifts convert numbers to the activations' dtype, which is exact. The scales multiply float32 sums,
so the only difference to a product with the widened weight is that the weight is not rounded. With
4-bit floats, of which few share a scale, it multiplies the numbers instead: that is exact in 16
bits, since it has one significant bit (e8m0) or four (e4m3). GPUs need not know any of these types.
The weight is the first operand, because Hopper's tensor cores take that one from registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from disagg.kernels.packed_sizes import BITS, FP4_KINDS, Kind, part_size

MAX_ROWS = 128  # on GPUs where groups of warps multiply: H100 and B200, by major capability
WARP_GROUPS = 9, 10
# Other GPUs have fewer registers for a tile and less shared memory, and many small groups need more
# of both. From taller tiles of 4 bits, Triton 3.7 makes a program without instructions for a B200.
MAX_ROWS_OF_WARPS = 64
FEW_WARPS_ROWS = 32


def launch_options(rows: int) -> dict[str, int]:
    """Warps and pipeline depth for a tile of so many rows of `x`."""
    if rows <= FEW_WARPS_ROWS:
        return {"num_warps": 4, "num_stages": 4}
    return {"num_warps": 8, "num_stages": 3}


def max_rows(kind: Kind, group: int | None, major: int) -> int:
    """The most rows of `x` in a tile."""
    is_cut = kind == "int4" and group is not None and group <= part_size(kind, group)
    if major not in WARP_GROUPS or is_cut or (BITS[kind] == 4 and major == WARP_GROUPS[1]):
        return MAX_ROWS_OF_WARPS
    return MAX_ROWS


@dataclass(frozen=True, slots=True)
class TileFormat:
    """How a matrix is packed, as a constant of kernels.

    Attributes:
        part: numbers in a part of a chunk; a chunk is one 16-bit unit of so many columns.
        group: numbers that share a scale; 0: all of a row.
        together: parts of a chunk whose sums share a scale.
    """

    kind: Kind
    bits: int
    is_fp4: bool
    part: int
    group: int
    together: int

    @classmethod
    def of(cls, kind: Kind, group: int | None) -> TileFormat:
        part, num_parts = part_size(kind, group), 16 // BITS[kind]
        together = num_parts
        if group is not None and kind not in FP4_KINDS:
            together = min(group // part, num_parts)
        return cls(kind, BITS[kind], kind in FP4_KINDS, part, group or 0, together)


@triton.jit
def numbers_of(units, part: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Part `part` of units as DTYPE. Numbers of int4 are too large by `base_of`."""
    if KIND == "int4":
        # 0x4300 is 128 in bfloat16, and 0x6400 is 1024 in float16, where the last bit of the
        # fraction counts 1.
        bits = (units >> (4 * part)) & 15
        if tl.bfloat16 == DTYPE:
            return (bits | 0x4300).to(tl.bfloat16, bitcast=True)
        return (bits | 0x6400).to(tl.float16, bitcast=True).to(DTYPE)
    elif KIND == "int8":
        return (units >> (8 * part)).to(tl.int8).to(DTYPE)
    elif KIND == "fp8":
        # The bits of e4m3 are moved to those of DTYPE, whose exponent has another bias; a factor
        # corrects that.
        if part == 0:
            sign, rest = (units << 8) & -32768, units << 4
        else:
            sign, rest = units & -32768, units >> 4
        if tl.bfloat16 == DTYPE:
            return (sign | (rest & 0x07F0)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
        half = sign | ((rest << 3) & 0x3F80)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:  # the same for e2m1
        bits = units >> (4 * part)
        sign, rest = (bits << 12) & -32768, bits & 7
        if tl.bfloat16 == DTYPE:
            return (sign | (rest << 6)).to(tl.bfloat16, bitcast=True) * 8.507059173023462e37
        half = sign | (rest << 9)
        return (half.to(tl.float16, bitcast=True) * 16384.0).to(DTYPE)


@triton.jit
def scale_of(words, place: tl.constexpr, KIND: tl.constexpr):
    """The scale at a place of words with four of e8m0 or e4m3, as float32."""
    bits = words >> (8 * place)
    if KIND == "mxfp4":
        return ((bits & 255) << 23).to(tl.float32, bitcast=True)
    else:
        moved = ((bits & 128) << 24) | ((bits & 127) << 20)
        return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def base_of(zero, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The number that must be subtracted from `numbers_of` for a zero. DTYPE represents it
    exactly."""
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
    row_scales_ptr,
    own,
    num_out,
    num_in,
    num_chunks,
    first_chunk,
    end_chunk,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Multiply some rows of W with x^T over some chunks of their columns: float32 [WIDTH, ROWS].

    Args:
        x_ptrs: [ROWS, 1], pointers to the first columns of rows of x.
        is_row: [ROWS, 1], whether these rows exist.
        own: int32 [WIDTH], rows of W, which all exist.
        num_out, num_in: shape of W, whose rows have `num_chunks` chunks.
        FORMAT: the `TileFormat` of W.
    """
    BITS: tl.constexpr = FORMAT.bits
    PART: tl.constexpr = FORMAT.part
    GROUP: tl.constexpr = FORMAT.group
    TOGETHER: tl.constexpr = FORMAT.together
    KIND: tl.constexpr = FORMAT.kind
    SCALES_SUMS: tl.constexpr = GROUP > 0 and not FORMAT.is_fp4
    PARTS: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = PARTS * PART
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    depth = tl.arange(0, PART)
    unit_ptrs = units_ptr + own.to(tl.int64)[:, None] * (num_chunks * PART) + depth[None, :]
    acc = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
    if (zeros_ptr is not None) and GROUP == 0:
        base = base_of(tl.load(zeros_ptr + own), BITS, DTYPE)[:, None]
    for chunk in range(first_chunk, end_chunk):
        units = tl.load(unit_ptrs + chunk * PART)
        if FORMAT.is_fp4:  # a chunk has the scales of a word, or of half a word
            first = chunk * (CHUNK // GROUP)
            words = tl.load(scales_ptr + first // 4 * num_out + own) >> (first % 4 * 8)
        for begin in tl.static_range(0, PARTS, TOGETHER):
            if SCALES_SUMS:
                # In a padded chunk the last groups, and the last columns of x, may not exist.
                group = (chunk * CHUNK + begin * PART) // GROUP
                places = tl.minimum(group, (num_in - 1) // GROUP) * num_out + own
                scale = tl.load(scales_ptr + places).to(tl.float32)
                if zeros_ptr is not None:
                    base = base_of(tl.load(zeros_ptr + places), BITS, DTYPE)[:, None]
                sums = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
            else:
                sums = acc
            for part in tl.static_range(begin, begin + TOGETHER):
                at = (chunk * CHUNK + part * PART + depth)[None, :]
                x = tl.load(x_ptrs + at, mask=is_row & (at < num_in), other=0.0)
                w = numbers_of(units, part, KIND, DTYPE)
                if FORMAT.is_fp4:
                    w *= scale_of(words, part * PART // GROUP, KIND).to(DTYPE)[:, None]
                elif zeros_ptr is not None:
                    w -= base
                elif KIND == "int4":
                    w -= 136.0 if tl.bfloat16 == DTYPE else 1032.0
                sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
            if SCALES_SUMS:
                acc += sums * scale[:, None]
            else:
                acc = sums
    if GROUP == 0:
        acc *= tl.load(scales_ptr + own).to(tl.float32)[:, None]
    if row_scales_ptr is not None:
        acc *= tl.load(row_scales_ptr + own)[:, None]
    return acc
