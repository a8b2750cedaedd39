"""A step's keys and values into their slots of a paged cache, as a Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a part of one upload a step
def _kv_write_kernel(
    qkv_ptr,
    pages_ptr,
    slots_ptr,
    token_stride,
    block_stride,
    NUM_QUERY_VALUES: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)  # int64: a slab is larger than 2^31 values
    values = tl.arange(0, BLOCK)
    inside = values < NUM_VALUES
    page, column = values // HEAD_DIM, values % HEAD_DIM
    loaded = tl.load(qkv_ptr + token * token_stride + NUM_QUERY_VALUES + values, mask=inside)
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    target += page * BLOCK_SIZE * HEAD_DIM + column
    tl.store(pages_ptr + target, loaded, mask=inside)


def kv_write(qkv: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    """Store keys and values of `qkv` in one layer of the cache.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        slots: int64 [num_tokens]: block_id * block_size + offset.
    """
    num_kv_heads, block_size, head_dim = kv_cache.shape[3:]
    num_values = 2 * num_kv_heads * head_dim
    if qkv.shape[0]:
        _kv_write_kernel[(qkv.shape[0],)](
            qkv,
            kv_cache[:, layer],
            slots,
            qkv.stride(0),
            kv_cache.stride(0),
            NUM_QUERY_VALUES=qkv.shape[1] * head_dim - num_values,
            NUM_VALUES=num_values,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            BLOCK=triton.next_power_of_2(num_values),
            num_warps=4,
        )
