"""Attention over a paged cache from torch's own operations.

Decoding sequences of similar length are gathered into one dense batch, with one call of attention.
A prompt without a cached prefix uses the step's own keys and values. `paging.py` decides once
per step which pages are read and written. `quantized.py` has the attention over a cache with
scales.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from disagg.kernels.cpu.prompts import PromptAttention
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PLAIN_SCORES, Scores
from disagg.kernels.torch.paging import PIECE_TOKENS, CachedKeys, Chunk, DecodeGroup, TorchPaging
from disagg.kernels.torch.products import attend_by_products
from disagg.kernels.torch.quantized import attend_quantized, store_quantized


def paged_attention(
    qkv: Tensor,
    kv_cache: KVPages,
    layer: int,
    window: int | None,
    paging: TorchPaging,
    sinks: Tensor | None = None,
    compiled: PromptAttention | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Write this step's keys and values, or latents, then attend. See `Ops.attention`."""
    num_kv_heads, block_size = kv_cache.values.shape[3:5]
    num_heads, head_dim = qkv.shape[1] - kv_cache.num_vectors * num_kv_heads, qkv.shape[2]
    first_page = layer * kv_cache.num_vectors
    if kv_cache.scales is None:
        vectors = kv_cache.rows.view(-1, head_dim)[first_page * block_size :]
        vectors.index_put_(paging.write_rows, qkv[:, num_heads:])
    else:
        store_quantized(qkv[:, num_heads:], kv_cache, first_page, paging.write_rows)
    attend = _Attend(kv_cache, first_page, sinks, scores)
    parts = []
    groups = paging.groups[window]
    q = qkv[: paging.num_decodes, :num_heads]
    if len(groups) == 1 and groups[0].queries is None:
        parts.append(attend.group(q, groups[0]))
    elif groups:
        decoded = q.new_empty(paging.num_decodes, num_heads * head_dim)
        for group in groups:
            decoded[group.queries] = attend.group(q[group.queries], group)
        parts.append(decoded)
    if paging.prompts is not None:
        assert compiled is not None
        attended = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
        if parts:
            attended[: paging.num_decodes] = parts[0]
        compiled.run(qkv, kv_cache, layer, window, paging.prompts, sinks, attended)
        return attended
    parts += [attend.chunk(qkv[piece.start : piece.end], piece) for piece in paging.chunks[window]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Attend:
    """Computes the attention of one layer."""

    def __init__(
        self, kv_cache: KVPages, first_page: int, sinks: Tensor | None, scores: Scores
    ) -> None:
        self._kv_cache, self._sinks, self._cap = kv_cache, sinks, scores.cap
        self._num_kv_heads, self._head_dim = kv_cache.values.shape[3], kv_cache.head_dim
        self._scale = scores.scale or self._head_dim**-0.5
        self._pages = kv_cache.rows[first_page:]

    def group(self, q: Tensor, group: DecodeGroup) -> Tensor:
        """Attention of one query per sequence.

        Takes [num_seqs, num_heads, head_dim], and returns [num_seqs, num_heads * head_dim].
        """
        # Heads that share keys become queries of one head; otherwise torch reads the keys for each.
        packed = q.view(q.shape[0], self._num_kv_heads, -1, self._head_dim)
        return self._attend(packed, group.keys).reshape(q.shape[0], -1)

    def chunk(self, qkv: Tensor, chunk: Chunk) -> Tensor:
        """Attention of several queries of one sequence.

        Takes [num_queries, all heads, head_dim], and returns [num_queries, num_heads * head_dim].
        """
        own = qkv.transpose(0, 1).unsqueeze(0)
        cuts = [-each * self._num_kv_heads for each in range(self._kv_cache.num_vectors, 0, -1)]
        q, *stored = own.tensor_split(cuts, dim=1)
        keys, values = stored[0], stored[-1]
        if chunk.keys is not None:
            out = self._attend(q, chunk.keys)
        elif self._sinks is not None or self._cap is not None:
            out = self._prompt_by_products(q, keys, values)
        else:
            has_groups = q.shape[1] != self._num_kv_heads
            out = scaled_dot_product_attention(
                q, keys, values, is_causal=True, scale=self._scale, enable_gqa=has_groups
            )
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)

    def _prompt_by_products(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a whole prompt, in pieces, so that no scores grow with its square."""
        sinks = None if self._sinks is None else self._sinks.view(-1, 1, 1)
        positions, parts = torch.arange(q.shape[2], device=q.device), []
        for piece in torch.split(positions, PIECE_TOKENS):
            first, end = int(piece[0]), int(piece[-1]) + 1
            mask = torch.where(positions[:end] > piece[:, None], float("-inf"), 0.0)
            own, seen = slice(first, end), slice(0, end)
            its_keys, its_values = keys[:, :, seen], values[:, :, seen]
            how = mask, sinks, self._scale, self._cap
            parts.append(attend_by_products(q[:, :, own], its_keys, its_values, *how))
        return torch.cat(parts, 2)

    def _attend(self, q: Tensor, cached: CachedKeys) -> Tensor:
        """Attention over gathered pages. Takes and returns [num_seqs, num_heads, num_queries,
        head_dim]."""
        self._gather(cached)
        # If heads are packed as queries, each query has the sink of its head.
        sinks = None if self._sinks is None else self._sinks.view(q.shape[1], -1, 1)
        if self._kv_cache.scales is not None:
            gathered = cached.rows, cached.seen, cached.mask
            return attend_quantized(q, *gathered, self._kv_cache, sinks, self._scale, self._cap)
        keys, values = cached.keys_and_values(self._head_dim)
        if sinks is not None or self._cap is not None:
            how = cached.mask, sinks, self._scale, self._cap
            return attend_by_products(q, keys, values, *how)
        return scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=cached.mask,
            scale=self._scale,
            enable_gqa=q.shape[1] != self._num_kv_heads,
        )

    def _gather(self, cached: CachedKeys) -> None:
        torch.index_select(self._pages, 0, cached.pages, out=cached.gathered)
