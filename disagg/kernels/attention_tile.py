"""One tile of keys of paged attention, in Triton: the inner step of `paged_attention`.

A cache of one byte a value or less has a scale for each key and each value vector. They multiply
columns of scores and of weights; keys and values are only widened on their way into the products:
int8 to the type of the queries, e4m3 to float16 (`paged_attention` has made the queries that), and
int4 by way of int8.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _unpacked(pairs):
    """int8 [TILE, BLOCK_D / 2] of two values each as int8 [TILE, BLOCK_D] (`kv_pages`)."""
    return tl.interleave(pairs << 4, pairs & -16)


@triton.jit
def attend_tile(
    q,
    acc,
    total,
    peak,
    start,
    pages_ptr,
    table_ptr,
    positions,
    oldest,
    context,
    scale,
    block_stride,
    scales_ptr,
    scale_block_stride,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys [start, start + TILE) to the running softmax of all rows.

    Args:
        pages_ptr, scales_ptr: keys of block 0, of the head; the values' are NUM_KV_HEADS pages on.
        LARGEST, PACKED: of the format; 0.0 and 1 for one without scales.
    """
    keys = start + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK_D // PACKED)
    inside = columns < HEAD_DIM // PACKED
    written = (keys < context) & (keys >= oldest)
    if BLOCK_SIZE % TILE == 0:  # one page per tile: a single contiguous run of memory
        page = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        offset = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        page = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < context, other=0).to(tl.int64)
        offset = keys % BLOCK_SIZE
    offsets = (page * block_stride + offset * (HEAD_DIM // PACKED))[:, None] + columns[None, :]
    value_offset: tl.constexpr = NUM_KV_HEADS * PAGE_STRIDE
    # What was never written may be NaN, and 0 * NaN is NaN: load zeros there.
    if MASKED:
        loaded = written[:, None] & inside[None, :]
        key = tl.load(pages_ptr + offsets, mask=loaded, other=0.0)
        value = tl.load(pages_ptr + value_offset + offsets, mask=loaded, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        loaded = inside[None, :]
        key = tl.load(pages_ptr + offsets, mask=loaded, other=0.0)
        value = tl.load(pages_ptr + value_offset + offsets, mask=loaded, other=0.0)
    else:
        key = tl.load(pages_ptr + offsets)
        value = tl.load(pages_ptr + value_offset + offsets)
    column_scale = scale
    if LARGEST != 0.0:
        scales = scales_ptr + page * scale_block_stride + offset
        value_scales = scales + NUM_KV_HEADS * SCALE_PAGE_STRIDE
        if MASKED:
            column_scale = tl.load(scales, mask=written, other=0.0)[None, :] * scale
            value_scale = tl.load(value_scales, mask=written, other=0.0)
        else:
            column_scale = tl.load(scales)[None, :] * scale
            value_scale = tl.load(value_scales)
        if PACKED == 2:
            key, value = _unpacked(key), _unpacked(value)
        key, value = key.to(q.dtype), value.to(q.dtype)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * column_scale
    if MASKED:
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    if LARGEST != 0.0:
        # Times the largest value of the vector: float16 holds that, and not its 448th part. The
        # caller divides the sum by LARGEST.
        weights *= value_scale[None, :] * LARGEST
    weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return acc * decay[:, None] + weighted, total, new_peak
