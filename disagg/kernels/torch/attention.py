"""Attention over a paged cache from torch's own operations, one sequence after the other.

It serves what compiled code does not: models in other types than bfloat16, odd sizes of heads, and
machines without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from disagg.kernels import reference
from disagg.kernels.kv_pages import SCALE_NBYTES, KVPages, clear_begun_blocks
from disagg.kernels.ops import PagedBatch, Scores, TokenIndex

QUERIES_AT_ONCE = 256  # so that no scores grow with the square of a prompt


@dataclass(frozen=True, slots=True)
class TorchPaging:
    """Where the layers of one step write and read vectors.

    Attributes:
        blocks, offsets: int64 [num_tokens], where the vectors of each token are stored.
        pages: int64 [num_vectors, num_kv_heads, num_seqs, max_num_blocks], rows of `KVPages.rows`
            with the blocks of each sequence, in the first layer of a block.
        spans: for each sequence its first token in the step, the end of its tokens, and the number
            of its positions with KV after this step.
        gathered: rows of `KVPages.rows` for all pages of the longest sequence in a layer, into
            which they are copied. New memory for each copy would take longer than the copy.
        chosen: int64 [num_tokens, most tokens that one attends to], positions that the index of a
            layer has chosen; None: there is no index.
    """

    blocks: Tensor
    offsets: Tensor
    pages: Tensor
    spans: Sequence[tuple[int, int, int]]
    gathered: Tensor
    chosen: Tensor | None = None

    def attend(
        self,
        qkv: Tensor,
        kv_cache: KVPages,
        layer: int,
        window: int | None,
        sinks: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        """Write this step's keys and values, or latents, then attend. See `Ops.attention`."""
        _, _, num_vectors, num_kv_heads, block_size, _ = kv_cache.values.shape
        num_heads, head_dim = qkv.shape[1] - num_vectors * num_kv_heads, qkv.shape[2]
        vectors = qkv[:, num_heads:].view(-1, num_vectors, num_kv_heads, head_dim)
        store(vectors, kv_cache, layer, self)
        out = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
        pages = self.pages + kv_cache.places[layer][1] * num_vectors
        for row, (start, end, length) in enumerate(self.spans):
            behind = length - (end - start)  # cached before this step
            skipped = _first_key(behind, window) // block_size
            own = pages[:, :, row, skipped : -(-length // block_size)]
            stored = read(kv_cache, own, self.gathered)
            for first in range(start, end, QUERIES_AT_ONCE):
                stop = min(first + QUERIES_AT_ONCE, end)
                query = behind + first - start
                key, end_key = _first_key(query, window), query + stop - first
                seen = stored[:, :, key - skipped * block_size : end_key - skipped * block_size]
                q = qkv[first:stop, :num_heads].transpose(0, 1).to(seen.dtype)
                made = _attend(q, seen, query, key, window, sinks, scores)
                out[first:stop] = made.transpose(0, 1)
        return out.flatten(1)


def plan_paging(
    batch: PagedBatch, kv_cache: KVPages, index: TokenIndex | None = None
) -> TorchPaging:
    """Find where a step writes and reads, and clear the blocks that it begins."""
    clear_begun_blocks(kv_cache, batch.block_tables, batch.context_lens_host, batch.query_lens)
    _, _, num_vectors, num_kv_heads, size, _ = kv_cache.values.shape
    spans, start = [], 0
    for length, new in zip(batch.context_lens_host, batch.query_lens, strict=True):
        spans.append((start, start + new, length))
        start += new
    blocks = batch.slots.div(size, rounding_mode="floor")
    heads = torch.arange(num_kv_heads)[:, None, None] * kv_cache.head_pages
    vectors = torch.arange(num_vectors)[:, None, None, None]
    pages = vectors + heads + batch.block_tables.long() * (num_kv_heads * kv_cache.head_pages)
    longest = max(batch.context_lens_host)
    most = -(-longest // size) * num_kv_heads * num_vectors
    gathered, chosen = kv_cache.rows.new_empty(most, kv_cache.rows.shape[1]), None
    if index is not None:
        shape = len(batch.slots), min(index.num_chosen, longest)
        chosen = torch.empty(shape, dtype=torch.int64)
    return TorchPaging(blocks, batch.slots - blocks * size, pages, spans, gathered, chosen)


def _first_key(query: int, window: int | None) -> int:
    """The first position that a query at a position sees."""
    return 0 if window is None else max(0, query - window + 1)


def store(vectors: Tensor, kv_cache: KVPages, layer: int, paging: TorchPaging) -> None:
    """Write a step's vectors, [num_tokens, num_vectors, num_kv_heads, head_dim]."""
    pages = kv_cache.layers[layer]
    where = paging.blocks, slice(None), slice(None), paging.offsets
    if pages.scales is None:
        pages.values[where] = vectors
        return
    numbers, scales = reference.quantize(vectors, kv_cache.format)
    pages.values.view(torch.int8)[where] = numbers.view(torch.int8)
    pages.scales[where] = scales


def read(kv_cache: KVPages, pages: Tensor, gathered: Tensor) -> Tensor:
    """The vectors of pages [num_vectors, num_kv_heads, num_blocks] as [num_vectors, num_kv_heads,
    positions, head_dim]; scaled ones in float32."""
    *_, size, width = kv_cache.values.shape
    rows = gathered[: pages.numel()]
    torch.index_select(kv_cache.rows, 0, pages.flatten(), out=rows)
    shape = *pages.shape[:2], -1, kv_cache.head_dim
    if kv_cache.scales is None:
        return rows.view(shape)
    format, begin = kv_cache.format, kv_cache.format.scales_offset(size, kv_cache.head_dim)
    numbers = rows[:, : size * width].view(format.dtype).view(-1, size, width)
    scales = rows[:, begin : begin + size * SCALE_NBYTES].view(torch.float32)
    return (reference.widen(numbers, format) * scales.unsqueeze(-1)).view(shape)


def _attend(
    q: Tensor,
    stored: Tensor,
    first_query: int,
    first_key: int,
    window: int | None,
    sinks: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Attention of some queries of one sequence, with a softmax in float32.

    Args:
        q: [num_heads, num_queries, head_dim]; they are the last positions of the keys.
        stored: keys and values, or latents: [num_vectors, num_kv_heads, num_keys, head_dim].
        first_query, first_key: positions.

    Returns:
        As `q`.
    """
    keys, values = stored[0], stored[-1]
    num_queries, seen = q.shape[1], None
    # Queries of the heads that share a KV head.
    packed = q.reshape(len(keys), -1, q.shape[2])
    if num_queries > 1:
        key = torch.arange(first_key, first_key + keys.shape[1])
        query = torch.arange(first_query, first_query + num_queries)[:, None]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
    if sinks is None and scores.cap is None:
        own = packed if seen is None else q
        made = scaled_dot_product_attention(
            own[None],
            keys[None],
            values[None],
            attn_mask=seen,
            scale=scores.scale,
            enable_gqa=len(own) != len(keys),
        )
        return made.view(q.shape)
    products = torch.matmul(packed, keys.transpose(1, 2)).float().view(*q.shape[:2], -1)
    products.mul_(scores.scale or q.shape[2] ** -0.5)
    if scores.cap is not None:
        products.div_(scores.cap).tanh_().mul_(scores.cap)
    if seen is not None:
        products.masked_fill_(~seen, float("-inf"))
    if sinks is None:
        weights = products.softmax(-1)
    else:  # sinks take part in the softmax and have no value
        lone = sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)
        weights = torch.cat((products, lone), -1).softmax(-1)[..., :-1]
    attended = torch.matmul(weights.reshape(*packed.shape[:2], -1).to(q.dtype), values)
    return attended.view(q.shape)
