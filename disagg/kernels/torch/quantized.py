"""Attention from torch's own operations over a cache with a scale for each vector.

Scales multiply scores and probabilities, one number per key, but never the numbers of a key. So
gathered numbers are only widened to the queries' dtype, which is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels.kv_pages import PACKED_STEP, PACKED_TOP, SCALE_NBYTES, KVFormat, KVPages
from disagg.kernels.torch.products import attend_by_products

_SMALLEST_PEAK = 1e-30  # so that the scale of a vector of zeros is not 0
# The bits of an e4m3 number are moved to those of bfloat16, whose exponent has another bias. This
# mask keeps the sign and the moved bits.
_E4M3_BITS = 0x87F0 - 0x10000
_E4M3_TO_BFLOAT16 = 2.0 ** (127 - 7)
_UPPER_HALVES = 0xF0F0 - 0x10000  # of both bytes of an int16


def store_quantized(
    vectors: Tensor, kv_cache: KVPages, first_page: int, where: tuple[Tensor, ...]
) -> None:
    """Quantise keys and values, and store them with their scales.

    Args:
        vectors: [num_tokens, 2 * num_kv_heads, head_dim].
        first_page: first page of the layer.
        where: int64 pages [num_tokens, 2 * num_kv_heads] and offsets in pages [num_tokens, 1].
    """
    block_size, stored_dim = kv_cache.values.shape[4:]
    format, rows = kv_cache.format, kv_cache.rows[first_page:]
    peaks = vectors.abs().amax(-1, True).float().clamp_min_(_SMALLEST_PEAK)
    if format.largest < 0.0:
        peaks = torch.where(vectors.amin(-1, True) <= -peaks, -peaks, peaks)
    scales = peaks.div_(format.largest)
    pages = rows[:, : block_size * stored_dim].view(-1, block_size, stored_dim)
    pages.index_put_(where, _stored(vectors / scales, format).view(torch.uint8))
    _scales(rows, kv_cache).index_put_(where, scales[..., 0])


def attend_quantized(
    q: Tensor,
    rows: Tensor,
    seen: slice,
    mask: Tensor | None,
    kv_cache: KVPages,
    sinks: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Compute attention over gathered pages.

    Args:
        q: [num_seqs, num_heads, num_queries, head_dim].
        rows: uint8 [2, num_seqs, num_kv_heads, num_pages, page_nbytes].
        seen: the positions in `rows` to which some query attends.
        mask: float32, added to the scores, or None.
        sinks, scale, cap: as in `attend_by_products`.

    Returns:
        [num_seqs, num_heads, num_queries, head_dim].
    """
    block_size, stored_dim = kv_cache.values.shape[4:]
    stored = rows[..., : block_size * stored_dim]
    wide = _widened(stored, kv_cache.format, q.dtype).view(*rows.shape[:3], -1, q.shape[3])
    keys, values = wide[:, :, :, seen].unbind(0)
    scales = _scales(rows, kv_cache).flatten(3)[:, :, :, None, seen]
    key_scales, value_scales = scales.unbind(0)
    both = key_scales, value_scales
    return attend_by_products(q, keys, values, mask, sinks, scale, cap, both)


def _scales(rows: Tensor, kv_cache: KVPages) -> Tensor:
    """The scales at the end of each page: [..., block_size]."""
    block_size = kv_cache.values.shape[4]
    begin = kv_cache.format.scales_offset(block_size, kv_cache.head_dim)
    return rows[..., begin : begin + block_size * SCALE_NBYTES].view(torch.float32)


def _stored(scaled: Tensor, format: KVFormat) -> Tensor:
    """Round scaled values to numbers of the format, and pack them."""
    if format.dtype.is_floating_point:
        return scaled.to(format.dtype)
    if format.packed == 1:
        return scaled.round_().to(format.dtype)
    halves = scaled.div_(PACKED_STEP).round_().clamp_max_(PACKED_TOP).to(format.dtype)
    return (halves[..., 0::2] & 15) | (halves[..., 1::2] << 4)


def _widened(stored: Tensor, format: KVFormat, dtype: torch.dtype) -> Tensor:
    """Convert stored bytes to numbers of `dtype`, contiguous, without their scales."""
    if format.packed == 2:
        # Both numbers of a byte are converted at once, in the two bytes of an int16. This takes a
        # third of the time of converting them separately and interleaving them.
        pairs = stored.to(torch.int16)
        bits = pairs.bitwise_left_shift(4).bitwise_or_(pairs.bitwise_left_shift_(8))
        return bits.bitwise_and_(_UPPER_HALVES).view(torch.int8).to(dtype)
    if format.dtype == torch.int8:
        return stored.view(torch.int8).to(dtype)
    # These four calls take a tenth of the time in which torch widens e4m3, one value at a time.
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(_E4M3_BITS)
    return bits.view(torch.bfloat16).mul_(_E4M3_TO_BFLOAT16).to(dtype)
