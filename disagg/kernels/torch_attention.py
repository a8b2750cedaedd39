"""Attention over a paged cache from torch's own operations.

Decoding sequences of similar length are gathered into one dense batch and attended in one call;
a prompt without cached prefix is attended straight from the step's own keys and values. All index
arithmetic happens once per step (`plan_paging`), not once per layer.

The cache is seen as pages, one row each (`KVPages.rows`). Page numbers are for layer 0; a layer
adds its offset. A cache with scales is attended in `torch_quantized.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch
from disagg.kernels.torch_quantized import attend_quantized, store_quantized

_MAX_WASTED_TOKENS = 512  # padding in a group of decodes that costs as much as one more group
_PIECE_TOKENS = 256  # queries of a prompt that share one mask


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """What is gathered for some sequences, and which of it they see."""

    pages: Tensor  # int64 [2 * num_seqs * num_kv_heads * num_blocks]
    num_seqs: int
    first: int  # of the gathered positions, [first, last) are looked at
    last: int
    mask: Tensor | None  # added to the scores; None: all of [first, last) is seen


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences that are attended together."""

    queries: Tensor | None  # int64 [num_seqs]: their token rows; None: all decodes, in order
    keys: CachedKeys


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens [start, end) of one sequence."""

    start: int
    end: int
    keys: CachedKeys | None  # None: causal over the chunk itself


@dataclass(frozen=True, slots=True)
class TorchPaging:
    """What one step's layers need."""

    # Where the step's vectors go, [num_tokens, 2 * num_kv_heads]: (pages, offsets in them)
    # of a cache with scales, else one row number each of the cache as [*, head_dim].
    write_rows: tuple[Tensor, ...]
    groups: dict[int | None, list[DecodeGroup]]  # by window
    chunks: dict[int | None, list[Chunk]]
    num_decodes: int
    scratch: Tensor  # rows as the cache's: where pages are gathered


def plan_paging(
    batch: PagedBatch, kv_cache: KVPages, windows: Iterable[int | None], scratch: Tensor
) -> TorchPaging:
    """Derive the rows to write and to read, for every window size in use.

    `scratch` is the one of an earlier step, kept if it still fits.
    """
    _clear_begun_blocks(batch, kv_cache)
    planner = _Planner(batch, kv_cache)
    unique = set(windows)
    groups = {window: planner.groups(window) for window in unique}
    chunks = {window: planner.chunks(window) for window in unique}
    gathered = [group.keys for some in groups.values() for group in some]
    gathered += [piece.keys for some in chunks.values() for piece in some if piece.keys]
    num_pages = max((keys.pages.shape[0] for keys in gathered), default=0)
    rows = kv_cache.rows
    fits = scratch.shape[0] >= num_pages and scratch.shape[1] == rows.shape[1]
    if scratch.dtype != rows.dtype or not fits:
        scratch = rows.new_empty(num_pages + num_pages // 4, rows.shape[1])
    return TorchPaging(planner.write_rows(), groups, chunks, batch.num_decodes, scratch)


def paged_attention(
    qkv: Tensor, kv_cache: KVPages, layer: int, window: int | None, paging: TorchPaging
) -> Tensor:
    """Write this step's keys and values, then attend. See `Ops.attention`."""
    num_kv_heads, block_size = kv_cache.values.shape[3:5]
    num_heads, head_dim = qkv.shape[1] - 2 * num_kv_heads, qkv.shape[2]
    first_page = layer * 2 * num_kv_heads
    if kv_cache.scales is None:
        vectors = kv_cache.rows.view(-1, head_dim)[first_page * block_size :]
        vectors.index_put_(paging.write_rows, qkv[:, num_heads:])
    else:
        store_quantized(qkv[:, num_heads:], kv_cache, first_page, paging.write_rows)
    attend = _Attend(kv_cache, first_page, paging.scratch)
    parts = []
    groups = paging.groups[window]
    q = qkv[: paging.num_decodes, :num_heads]
    if len(groups) == 1 and groups[0].queries is None:
        parts.append(attend.group(q, groups[0].keys))
    elif groups:
        decoded = q.new_empty(paging.num_decodes, num_heads * head_dim)
        for group in groups:
            decoded[group.queries] = attend.group(q[group.queries], group.keys)
        parts.append(decoded)
    parts += [attend.chunk(qkv[piece.start : piece.end], piece) for piece in paging.chunks[window]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Attend:
    """Attention calls of one layer."""

    def __init__(self, kv_cache: KVPages, first_page: int, scratch: Tensor) -> None:
        self._kv_cache = kv_cache
        self._num_kv_heads, self._head_dim = kv_cache.values.shape[3], kv_cache.head_dim
        self._pages = kv_cache.rows[first_page:]
        self._scratch = scratch

    def group(self, q: Tensor, cached: CachedKeys) -> Tensor:
        """One query each: [num_seqs, num_heads, head_dim] in, heads flat out."""
        # Heads that share keys become queries of one head: else torch reads the keys once for each.
        packed = q.view(q.shape[0], self._num_kv_heads, -1, self._head_dim)
        return self._attend(packed, cached).reshape(q.shape[0], -1)

    def chunk(self, qkv: Tensor, chunk: Chunk) -> Tensor:
        """Queries of one sequence: [num_queries, all heads, head_dim] in, heads flat out."""
        own = qkv.transpose(0, 1).unsqueeze(0)
        q, keys, values = own.tensor_split((-2 * self._num_kv_heads, -self._num_kv_heads), dim=1)
        if chunk.keys is not None:
            out = self._attend(q, chunk.keys)
        else:
            out = scaled_dot_product_attention(
                q, keys, values, is_causal=True, enable_gqa=q.shape[1] != self._num_kv_heads
            )
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)

    def _attend(self, q: Tensor, cached: CachedKeys) -> Tensor:
        """Look at gathered pages: [num_seqs, num_heads, num_queries, head_dim] in and out."""
        gathered = self._scratch[: cached.pages.shape[0]]
        torch.index_select(self._pages, 0, cached.pages, out=gathered)
        shape = (2, cached.num_seqs, self._num_kv_heads, -1)
        seen = slice(cached.first, cached.last)
        if self._kv_cache.scales is not None:
            rows = gathered.view(*shape, gathered.shape[1])
            return attend_quantized(q, rows, seen, cached.mask, self._kv_cache)
        keys, values = gathered.view(*shape, self._head_dim)[:, :, :, seen].unbind(0)
        return scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=cached.mask,
            enable_gqa=q.shape[1] != self._num_kv_heads,
        )


def _clear_begun_blocks(batch: PagedBatch, kv_cache: KVPages) -> None:
    """Zero the blocks that this step begins and does not fill.

    A group reads whole blocks and masks their unwritten ends, but a NaN that an earlier owner
    left there would survive the mask (0 * NaN is NaN). Blocks that come from another worker were
    begun by one that did the same.
    """
    block_size = kv_cache.values.shape[4]
    spans = zip(batch.context_lens_host, batch.query_lens, strict=True)
    begun = [
        (row, length // block_size)
        for row, (length, new) in enumerate(spans)
        if 0 < length % block_size <= new
    ]
    if begun:
        rows, columns = zip(*begun, strict=True)
        block_ids = batch.block_tables[list(rows), list(columns)]
        kv_cache.blocks.index_fill_(0, block_ids.long(), 0)


class _Planner:
    """Turns block tables into page numbers, for one batch."""

    def __init__(self, batch: PagedBatch, kv_cache: KVPages) -> None:
        _, num_layers, _, self._num_kv_heads, self._block_size, _ = kv_cache.values.shape
        self._batch = batch
        self._has_scales = kv_cache.scales is not None
        self._mask_dtype = torch.float32 if self._has_scales else kv_cache.values.dtype
        self._device = kv_cache.values.device
        self._pages_per_block = num_layers * 2 * self._num_kv_heads
        self._page = torch.arange(2 * self._num_kv_heads, device=self._device)

    def write_rows(self) -> tuple[Tensor, ...]:
        slots, size = self._batch.slots, self._block_size
        blocks = slots.div(size, rounding_mode="floor")
        pages = (blocks * self._pages_per_block)[:, None] + self._page
        offsets = (slots - blocks * size)[:, None]
        return (pages, offsets) if self._has_scales else (pages * size + offsets,)

    def groups(self, window: int | None) -> list[DecodeGroup]:
        """Cut the decodes, longest first, where padding would cost more than another group."""
        lengths = self._batch.context_lens_host[: self._batch.num_decodes]
        if not lengths:
            return []
        tables = self._batch.block_tables
        seen = [length if window is None else min(length, window) for length in lengths]
        if max(seen) * len(seen) - sum(seen) <= _MAX_WASTED_TOKENS:
            return [DecodeGroup(None, self._decode_keys(tables[: len(seen)], lengths, window))]
        cuts: list[list[int]] = [[]]
        wasted = 0
        for row in sorted(range(len(seen)), key=lambda row: -seen[row]):
            wasted += seen[cuts[-1][0]] - seen[row] if cuts[-1] else 0
            if wasted > _MAX_WASTED_TOKENS:
                cuts.append([])
                wasted = 0
            cuts[-1].append(row)
        groups = []
        for rows in cuts:
            queries = torch.tensor(rows, device=self._device)
            own = [lengths[row] for row in rows]
            keys = self._decode_keys(tables.index_select(0, queries), own, window)
            groups.append(DecodeGroup(queries, keys))
        return groups

    def _decode_keys(
        self, tables: Tensor, lengths: Sequence[int], window: int | None
    ) -> CachedKeys:
        size = self._block_size
        starts = [0 if window is None else max(length - window, 0) for length in lengths]
        skipped = [start // size for start in starts]
        counts = [-(-n // size) - skip for n, skip in zip(lengths, skipped, strict=True)]
        pages = self._pages(tables, skipped, counts)
        if len(lengths) == 1:
            base = skipped[0] * size
            return CachedKeys(pages, 1, starts[0] - base, lengths[0] - base, None)
        num_keys = max(counts) * size
        bounds = torch.tensor((skipped, starts, lengths), device=self._device)
        positions = bounds[0, :, None] * size + torch.arange(num_keys, device=self._device)
        hidden = (positions < bounds[1, :, None]) | (positions >= bounds[2, :, None])
        return CachedKeys(pages, len(lengths), 0, num_keys, self._mask(hidden)[:, None, None])

    def _pages(self, tables: Tensor, skipped: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Pages [2, num_seqs, num_kv_heads, num_blocks], flat; short sequences repeat a block.

        The repeated block is the sequence's own, so nothing of another one is ever read.
        """
        most = max(counts)
        if min(counts) == most and not any(skipped):
            picked = tables[:, :most]
        else:
            bounds = torch.tensor((skipped, counts), device=self._device)
            columns = torch.arange(most, device=self._device).minimum(bounds[1, :, None] - 1)
            picked = tables.gather(1, columns + bounds[0, :, None])
        first = (picked.long() * self._pages_per_block)[None, :, None, :]
        return (first + self._page.view(2, 1, -1, 1)).flatten()

    def chunks(self, window: int | None) -> list[Chunk]:
        """Cut what reads the cache into pieces, so that no mask grows with a prompt's square."""
        batch = self._batch
        chunks = []
        end = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            start, end = end, end + batch.query_lens[row]
            length = batch.context_lens_host[row]
            # With scales also a prompt's own keys are read as they are stored: what comes out
            # must not depend on how a prompt was cut.
            fresh = length == end - start and not self._has_scales
            if fresh and (window is None or length <= window):
                chunks.append(Chunk(start, end, None))
                continue
            for piece in range(start, end, _PIECE_TOKENS):
                stop = min(piece + _PIECE_TOKENS, end)
                span = (length - (end - piece), length - (end - stop))
                chunks.append(Chunk(piece, stop, self._chunk_keys(row, span, window)))
        return chunks

    def _chunk_keys(self, row: int, span: tuple[int, int], window: int | None) -> CachedKeys:
        """Keys of the queries at positions [span[0], span[1])."""
        first_query, end = span
        size = self._block_size
        first_key = 0 if window is None else max(first_query - window + 1, 0)
        skipped = first_key // size
        count = -(-end // size) - skipped
        pages = self._pages(self._batch.block_tables[row : row + 1], [skipped], [count])
        keys = torch.arange(first_key, end, device=self._device)
        queries = torch.arange(first_query, end, device=self._device)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        base = skipped * size
        return CachedKeys(pages, 1, first_key - base, end - base, self._mask(hidden))

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._mask_dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))
