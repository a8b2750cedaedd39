"""A tile of a product in 8 bits, used for single matrices and for experts, and the rows it needs.

From `EIGHT_BIT_ROWS` rows on (experts: of one of them on average), a matrix whose checkpoint says
that activations are quantised multiplies numbers of 8 bits, twice as fast as of 16; fewer rows wait
for the bytes of the weight, and stay in 16 bits (`packed_tile`). Each row of activations gets a
scale, or each group of its columns if columns of the weight have groups, unless the checkpoint has
one scale for all. The scales multiply float32 sums of `CHUNK` products, since tensor cores add e4m3
with some 14 bits.

A unit of a packed weight has two numbers whose columns are half a chunk apart. A product adds its
columns in any order, so activations are stored in the order of the weight's bytes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.kv_write import ROUND, SMALLEST_PEAK
from disagg.kernels.packed_matrix import LARGEST, PackedMatrix
from disagg.kernels.packed_sizes import EIGHT_BIT_CHUNK, Kind

CHUNK = tl.constexpr(EIGHT_BIT_CHUNK)  # columns that are multiplied at once
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def kinds_of(capability: tuple[int, int]) -> frozenset[Kind]:
    """The kinds of numbers that a GPU's tensor cores multiply as they are.

    A B200's have int8 only as older GPUs had it, which is slower than its 16 bits.
    """
    kinds: dict[Kind, bool] = {
        "int8": capability >= (8, 0) and capability[0] != 10,
        "fp8": capability >= (8, 9),
    }
    return frozenset(kind for kind, has in kinds.items() if has)


def why_16_bits(weight: PackedMatrix, kinds: frozenset[Kind]) -> str:
    """Why products with a matrix stay in 16 bits; empty: those of many rows do not."""
    if weight.kind not in DTYPES:
        return "only fp8 and int8 are multiplied as they are"
    if weight.input_scale is None:
        return "the checkpoint does not say that activations are quantised"
    if weight.kind not in kinds:
        return "this GPU has no such tensor cores"
    if weight.zeros is not None or weight.order is not None:
        return "numbers with zero points or an order are not"
    if weight.group is not None and weight.group % EIGHT_BIT_CHUNK:
        return f"groups of {weight.group} columns are smaller than {EIGHT_BIT_CHUNK}"
    return ""


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    static_scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    half: tl.constexpr = CHUNK // 2
    column = place // CHUNK * CHUNK + place % 2 * half + place % CHUNK // 2
    x = tl.load(x_ptr + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    sizes = tl.abs(x)
    scale = static_scale + tl.zeros([GROUPS], tl.float32)
    if not IS_STATIC:
        peak = tl.maximum(tl.max(sizes, axis=1), SMALLEST_PEAK)
        scale = tl.div_rn(peak, tl.full([GROUPS], LARGEST, tl.float32))
    # Numbers keep neither infinity nor (int8) NaN, so the scale of such a row or group is NaN.
    is_finite = tl.min((sizes < float("inf")).to(tl.int32), axis=1) == 1
    factor = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)[:, None]
    scaled = tl.clamp(tl.where(is_finite[:, None], x, 0.0) * factor, -LARGEST, LARGEST)
    if numbers_ptr.dtype.element_ty == tl.int8:
        scaled = (scaled + ROUND) - ROUND
    numbers = scaled.to(numbers_ptr.dtype.element_ty)
    tl.store(numbers_ptr + row * PADDED + place, numbers, mask=place < PADDED)
    num_groups: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    scale = tl.where(is_finite, scale, float("nan"))
    tl.store(scales_ptr + row * num_groups + group, scale, mask=group < num_groups)


def quantize_rows(x: Tensor, weight: PackedMatrix) -> tuple[Tensor, Tensor]:
    """Quantise activations for `eight_bit_tile`, whose columns become a multiple of `CHUNK`.

    Args:
        x: contiguous floats [num_rows, num_in].
        weight: says how; `why_16_bits` must be empty.

    Returns:
        Numbers [num_rows, num_chunks * CHUNK], in the order of the weight's bytes, and float32
        scales [num_rows, num_groups], or [num_rows, 1].
    """
    num_rows, size = x.shape
    padded = weight.units.shape[1] * 2
    group = weight.group or next_power_of_2(padded)
    num_groups = -(-padded // group)
    numbers = torch.empty(num_rows, padded, dtype=DTYPES[weight.kind], device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    _quantize_rows_kernel[(num_rows,)](
        x,
        numbers,
        scales,
        weight.input_scale or 0.0,
        SIZE=size,
        PADDED=padded,
        GROUP=group,
        GROUPS=next_power_of_2(num_groups),
        LARGEST=LARGEST[weight.kind],
        IS_STATIC=bool(weight.input_scale),
        num_warps=quantizing_warps(padded),
    )
    return numbers, scales


def quantizing_warps(size: int) -> int:
    """Warps of a program that quantises a row of so many columns."""
    return min(max(next_power_of_2(size) // 512, 1), 16)


@triton.jit
def eight_bit_tile(
    x_ptrs,
    x_scales_ptrs,
    numbers_ptr,
    scales_ptr,
    own,
    num_out,
    num_chunks,
    first_chunk,
    end_chunk,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As `packed_tile`, with numbers of 8 bits on both sides.

    Args:
        x_ptrs: [ROWS, 1], pointers to the first numbers of quantised rows, which all exist: a mask
            would take registers that there are not.
        x_scales_ptrs: [ROWS], pointers to their first scales.
        numbers_ptr: the weight's units, as numbers.
        GROUP: columns that share a scale; 0: all.
    """
    depth = tl.arange(0, CHUNK)[None, :]
    number_ptrs = numbers_ptr + own.to(tl.int64)[:, None] * (num_chunks * CHUNK) + depth
    acc = tl.zeros([WIDTH, ROWS], dtype=tl.float32)
    for chunk in range(first_chunk, end_chunk):
        numbers = tl.load(number_ptrs + chunk * CHUNK)
        x = tl.load(x_ptrs + (chunk * CHUNK + depth))
        sums = tl.dot(numbers, tl.trans(x)).to(tl.float32)
        if GROUP:
            group = chunk * CHUNK // GROUP
            x_scale = tl.load(x_scales_ptrs + group)
            scale = tl.load(scales_ptr + group * num_out + own).to(tl.float32)
            acc += sums * scale[:, None] * x_scale[None, :]
        else:
            acc += sums
    if GROUP == 0:
        x_scale = tl.load(x_scales_ptrs)
        acc *= tl.load(scales_ptr + own).to(tl.float32)[:, None] * x_scale[None, :]
    return acc
