"""One tile of keys of paged attention, in Triton: the inner step of `paged_attention`.

A quantised cache (fp8, int8, int4) has a scale for each key and each value vector. The scales
multiply columns of the scores and of the softmax weights. Keys and values themselves are only
widened for the matrix products: e4m3 numbers, and values that are read in pairs, to float16, and
other integers to the queries' dtype. These dtypes represent every stored value exactly.

Tiles of few rows load keys and values from shared memory straight into the registers of a matrix
product. A GPU loads many 16-bit values in one instruction, even transposed, but it loads bytes that
must be transposed, as values must, one by one. So such tiles read a quantised cache as 16-bit
units, and split each unit in registers into two values, or four of int4. Each part has a separate
matrix product: the first values of all units are one half of a vector, and the second values are
the other half. Only the result is put back in order. Tiles of many rows pass widened values through
shared memory anyway, so they read bytes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _parts_of(units, LARGEST: tl.constexpr, PARTS: tl.constexpr):
    """Split units into PARTS tensors of the same shape, with their first, second, ... values."""
    if PARTS == 1:
        return (units,)
    elif units.dtype == tl.int8:  # int4, whose values are multiples of 16
        return (units << 4, units & -16)
    elif LARGEST == 448.0:  # e4m3
        low = units.to(tl.int8).to(tl.float8e4nv, bitcast=True)
        high = (units >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        return (low, high)
    # 0x6400 is 1024 in float16, where the last bit of the fraction counts 1. The results are 1024 +
    # 128 + value. This takes two operations for two values; a conversion takes one slower operation
    # for each value.
    elif PARTS == 4:
        first = (((units << 4) & 240) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        second = ((units & 240) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        third = (((units >> 4) & 240) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        fourth = (((units >> 8) & 240) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        return (first, second, third, fourth)
    else:
        low = ((units & 255) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        high = (((units >> 8) & 255) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        return (low, high)


@triton.jit
def attend_tile(
    q,
    acc,
    total,
    peak,
    start,
    pages,
    seen,
    PAGE_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys [start, start + TILE) to the running softmax of all rows.

    Args:
        q, acc: PARTS tensors each, [ROWS, BLOCK_D / PARTS]: column c of part j is value
            c * PARTS + j of a head.
        pages: the head's keys in block 0, whose values are in the next page; the sequence's block
            table; the stride of blocks; the head's scales in block 0, and the stride of blocks.
        seen: the position of each row, the oldest and the end of the keys that any row sees, and
            the factor of scores.
        CAP: of scores; this and the factor are from `paged_attention.in_base_2`.
        LARGEST: the format's largest number; 0.0 for a format without scales.
        PARTS: values in a unit of the cache. All sizes and strides of pages are in units.
    """
    pages_ptr, table_ptr, block_stride, scales_ptr, scale_block_stride = pages
    positions, oldest, context, scale = seen
    keys = start + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK_D // PARTS)
    inside = columns < HEAD_DIM // PARTS
    written = (keys < context) & (keys >= oldest)
    if BLOCK_SIZE % TILE == 0:  # one page per tile: a single contiguous run of memory
        page = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        offset = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        page = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < context, other=0).to(tl.int64)
        offset = keys % BLOCK_SIZE
    offsets = (page * block_stride + offset * (HEAD_DIM // PARTS))[:, None] + columns[None, :]
    # Slots that were never written may be NaN, and 0 * NaN is NaN, so load zeros there.
    if MASKED:
        loaded = written[:, None] & inside[None, :]
        key = tl.load(pages_ptr + offsets, mask=loaded, other=0.0)
        value = tl.load(pages_ptr + PAGE_STRIDE + offsets, mask=loaded, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        loaded = inside[None, :]
        key = tl.load(pages_ptr + offsets, mask=loaded, other=0.0)
        value = tl.load(pages_ptr + PAGE_STRIDE + offsets, mask=loaded, other=0.0)
    else:
        key = tl.load(pages_ptr + offsets)
        value = tl.load(pages_ptr + PAGE_STRIDE + offsets)
    column_scale = scale
    if LARGEST != 0.0:
        scales = scales_ptr + page * scale_block_stride + offset
        value_scales = scales + SCALE_PAGE_STRIDE
        if MASKED:
            column_scale = tl.load(scales, mask=written, other=0.0)[None, :] * scale
            value_scale = tl.load(value_scales, mask=written, other=0.0)
        else:
            column_scale = tl.load(scales)[None, :] * scale
            value_scale = tl.load(value_scales)
    keys_of, values_of = _parts_of(key, LARGEST, PARTS), _parts_of(value, LARGEST, PARTS)
    scores = tl.dot(q[0], tl.trans(keys_of[0].to(q[0].dtype)), input_precision="ieee")
    for part in tl.static_range(1, PARTS):
        its_keys = tl.trans(keys_of[part].to(q[0].dtype))
        scores = tl.dot(q[part], its_keys, scores, input_precision="ieee")
    scores *= column_scale
    if CAP > 0.0:  # tanh(x) = 1 - 2 / (1 + e^(2 x))
        scores = CAP - 2.0 * CAP / (1.0 + tl.exp2(scores))
    if MASKED:
        is_seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    if LARGEST != 0.0:
        # The scales are multiplied by LARGEST, because float16 holds the largest value of a vector,
        # but not always 1 / 448 of it. The caller divides the sum by LARGEST.
        weights *= value_scale[None, :] * LARGEST
    weights = weights.to(q[0].dtype)
    sums = ()
    for part in tl.static_range(PARTS):
        its_values = values_of[part].to(q[0].dtype)
        sums += (tl.dot(weights, its_values, acc[part] * decay[:, None], input_precision="ieee"),)
    return sums, total, new_peak
