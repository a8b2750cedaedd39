"""A Triton kernel that writes a step's keys and values to their slots of a paged cache.

For a format with scales, it quantises: one pass reads a vector, finds its largest value, and stores
the rounded values and the scale. Each key and each value vector of each head has its own scale.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.kv_pages import PACKED_STEP, PACKED_TOP, SCALE_NBYTES, KVPages

SMALLEST_PEAK = tl.constexpr(1.0e-30)  # so that the scale of a vector of zeros is not 0
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, half to even
_STEP, _TOP = tl.constexpr(float(PACKED_STEP)), tl.constexpr(float(PACKED_TOP))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # part of the step's upload
def _kv_write_kernel(
    qkv_ptr,
    pages_ptr,
    scales_ptr,
    slots_ptr,
    token_stride,
    block_stride,
    scale_block_stride,
    NUM_QUERY_VALUES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    HEAD_PAGES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    PACKED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)  # int64, because a slab may have more than 2^31 values
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    vector = tl.arange(0, PAGES)  # keys of all heads, then values; latents have no values
    page = vector % NUM_HEADS * HEAD_PAGES + vector // NUM_HEADS
    column = tl.arange(0, BLOCK_D)
    is_page = (vector < NUM_PAGES) & (slot >= 0)
    inside = is_page[:, None] & (column < HEAD_DIM)[None, :]
    source = token * token_stride + NUM_QUERY_VALUES + vector[:, None] * HEAD_DIM + column[None, :]
    loaded = tl.load(qkv_ptr + source, mask=inside, other=0.0)
    if LARGEST != 0.0:
        wide = loaded.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(wide), axis=1), SMALLEST_PEAK)
        if LARGEST < 0.0:
            peak = tl.where(tl.min(wide, axis=1) <= -peak, -peak, peak)
        scale = peak / LARGEST
        total = tl.sum(wide, axis=1)
        scale = tl.where(total == total, scale, total)  # keep NaN, which rounded values cannot
        scale_target = block * scale_block_stride + page * SCALE_PAGE_STRIDE + offset
        tl.store(scales_ptr + scale_target, scale, mask=is_page)
        scaled = wide / scale[:, None]
        if PACKED == 2:
            rounded = (scaled / _STEP + ROUND) - ROUND
            number = tl.minimum(rounded, _TOP).to(tl.int8)
            low, high = tl.split(tl.reshape(number, [PAGES, BLOCK_D // 2, 2]))
            stored = (low & 15) | (high << 4)
        elif pages_ptr.dtype.element_ty == tl.int8:
            stored = ((scaled + ROUND) - ROUND).to(tl.int8)
        else:
            stored = scaled.to(pages_ptr.dtype.element_ty)
    else:
        stored = loaded
    column = tl.arange(0, BLOCK_D // PACKED)
    inside = is_page[:, None] & (column < HEAD_DIM // PACKED)[None, :]
    target = block * block_stride + page[:, None] * PAGE_STRIDE
    target += offset * (HEAD_DIM // PACKED) + column[None, :]
    tl.store(pages_ptr + target, stored, mask=inside)


def kv_write(qkv: Tensor, kv_cache: KVPages, layer: int, slots: Tensor) -> None:
    """Store keys and values of `qkv`, or latents, in one layer of the cache.

    Args:
        qkv: [num_tokens, num_heads + num_vectors * num_kv_heads, head_dim]: queries, keys, values.
        slots: int64 [num_tokens]: block_id * block_size + offset; negative: the token is skipped.
    """
    values, head_dim = kv_cache.values, kv_cache.head_dim
    num_kv_heads, block_size = values.shape[3:5]
    num_pages = kv_cache.num_vectors * num_kv_heads
    if qkv.shape[0]:
        layer_values, _, layer_scales = kv_cache.layers[layer]
        _kv_write_kernel[qkv.shape[0],](
            qkv,
            layer_values,
            layer_scales,
            slots,
            qkv.stride(0),
            values.stride(0),
            0 if layer_scales is None else layer_scales.stride(0),
            NUM_QUERY_VALUES=(qkv.shape[1] - num_pages) * head_dim,
            NUM_HEADS=num_kv_heads,
            NUM_PAGES=num_pages,
            PAGES=next_power_of_2(num_pages),
            PAGE_STRIDE=kv_cache.page_stride,
            SCALE_PAGE_STRIDE=kv_cache.page_stride // SCALE_NBYTES,
            HEAD_PAGES=kv_cache.head_pages,
            HEAD_DIM=head_dim,
            BLOCK_D=next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
            LARGEST=kv_cache.format.largest,
            PACKED=kv_cache.format.packed,
            num_warps=4,
        )
