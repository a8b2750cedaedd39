"""Attention over a paged cache from torch's own operations.

Decoding sequences of similar length are gathered into one dense batch and attended in one call;
a prompt without cached prefix is attended straight from the step's own keys and values. All index
arithmetic happens once per step (`plan_paging`), not once per layer.

The cache is seen as rows: [num_blocks * num_layers * 2 * num_kv_heads, block_size * head_dim].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from disagg.kernels.ops import PagedBatch

_MAX_WASTED_TOKENS = 512  # padding in a group of decodes that costs as much as one more group


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences that are attended together."""

    queries: Tensor | None  # int64 [num_seqs]: their token rows; None: all decodes, in order
    page_rows: Tensor  # int64 [2 * num_seqs * num_kv_heads * num_pages], for layer 0
    num_seqs: int
    first: int  # keys [first, last) of what is gathered are looked at
    last: int
    mask: Tensor | None  # [num_seqs, 1, 1, num_keys], added to the scores


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence: a prompt, a part of one, or a few tokens to verify."""

    start: int
    end: int
    page_rows: Tensor | None  # as in `DecodeGroup`; None: nothing cached before this chunk
    first: int
    last: int
    mask: Tensor | None  # [num_queries, num_keys]; None: causal


@dataclass(frozen=True, slots=True)
class TorchPaging:
    """What one step's layers need. Rows are for layer 0; a layer adds its offset."""

    write_rows: Tensor  # int64 [num_tokens, 2 * num_kv_heads] of [*, head_dim]
    groups: dict[int | None, list[DecodeGroup]]
    chunks: dict[int | None, list[Chunk]]
    num_decodes: int


def plan_paging(batch: PagedBatch, kv_cache: Tensor, windows: Iterable[int | None]) -> TorchPaging:
    """Derive the rows to write and to read, for every window size in use."""
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    pages_per_block = num_layers * 2 * num_kv_heads
    blocks = batch.slots.div(block_size, rounding_mode="floor")
    page = torch.arange(2 * num_kv_heads, device=kv_cache.device)
    write_rows = (blocks * pages_per_block)[:, None] + page
    write_rows = write_rows * block_size + (batch.slots - blocks * block_size)[:, None]
    _clear_begun_blocks(batch, kv_cache)
    planner = _Planner(batch, kv_cache)
    unique = set(windows)
    return TorchPaging(
        write_rows=write_rows,
        groups={window: planner.groups(window) for window in unique},
        chunks={window: planner.chunks(window) for window in unique},
        num_decodes=batch.num_decodes,
    )


def paged_attention(
    qkv: Tensor, kv_cache: Tensor, layer: int, window: int | None, paging: TorchPaging
) -> Tensor:
    """Write this step's keys and values, then attend. See `Ops.attention`."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[3:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    first_page = layer * 2 * num_kv_heads
    values = kv_cache.view(-1, head_dim)[first_page * block_size :]
    values.index_put_((paging.write_rows,), qkv[:, num_heads:])
    pages = kv_cache.view(-1, block_size * head_dim)[first_page:]
    q = qkv[:, :num_heads]
    parts = [
        _attend_chunk(qkv, num_heads, pages, head_dim, chunk) for chunk in paging.chunks[window]
    ]
    groups = paging.groups[window]
    if len(groups) == 1 and groups[0].queries is None:
        parts.insert(0, _attend_group(q[: paging.num_decodes], pages, num_kv_heads, groups[0]))
    elif groups:
        decoded = q.new_empty(paging.num_decodes, num_heads * head_dim)
        for group in groups:
            decoded[group.queries] = _attend_group(q[group.queries], pages, num_kv_heads, group)
        parts.insert(0, decoded)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(q: Tensor, pages: Tensor, num_kv_heads: int, group: DecodeGroup) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    gathered = pages.index_select(0, group.page_rows)
    keys, values = gathered.view(2, num_seqs, num_kv_heads, -1, head_dim)[
        :, :, :, group.first : group.last
    ].unbind(0)
    out = scaled_dot_product_attention(
        q.unsqueeze(2), keys, values, attn_mask=group.mask, enable_gqa=num_heads != num_kv_heads
    )
    return out.reshape(num_seqs, num_heads * head_dim)


def _attend_chunk(
    qkv: Tensor, num_heads: int, pages: Tensor, head_dim: int, chunk: Chunk
) -> Tensor:
    own = qkv[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0)
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, keys, values = torch.split(own, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if chunk.page_rows is not None:
        gathered = pages.index_select(0, chunk.page_rows)
        keys, values = gathered.view(2, 1, num_kv_heads, -1, head_dim)[
            :, :, :, chunk.first : chunk.last
        ].unbind(0)
    out = scaled_dot_product_attention(
        q,
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2).reshape(-1, num_heads * head_dim)


def _clear_begun_blocks(batch: PagedBatch, kv_cache: Tensor) -> None:
    """Zero the blocks that this step begins and does not fill.

    A group reads whole blocks and masks their unwritten ends, but a NaN that an earlier owner
    left there would survive the mask (0 * NaN is NaN).
    """
    block_size = kv_cache.shape[4]
    begun = [
        (row, (length - 1) // block_size)
        for row, (length, new) in enumerate(
            zip(batch.context_lens_host, batch.query_lens, strict=True)
        )
        if length % block_size and (length - 1) // block_size * block_size >= length - new
    ]
    if begun:
        rows, columns = zip(*begun, strict=True)
        block_ids = batch.block_tables[list(rows), list(columns)]
        kv_cache.index_fill_(0, block_ids.long(), 0)


class _Planner:
    """Turns block tables into rows of pages, for one batch."""

    def __init__(self, batch: PagedBatch, kv_cache: Tensor) -> None:
        _, num_layers, _, num_kv_heads, self._block_size, _ = kv_cache.shape
        self._batch = batch
        self._dtype = kv_cache.dtype
        self._device = kv_cache.device
        self._pages_per_block = num_layers * 2 * num_kv_heads
        kinds = torch.arange(2, device=self._device)[:, None, None, None] * num_kv_heads
        heads = torch.arange(num_kv_heads, device=self._device)[:, None]
        self._page_offsets = kinds + heads  # [2, 1, num_kv_heads, 1]

    def groups(self, window: int | None) -> list[DecodeGroup]:
        """Cut the decodes, longest first, where padding would cost more than another group."""
        lengths = self._batch.context_lens_host[: self._batch.num_decodes]
        if not lengths:
            return []
        visible = [length if window is None else min(length, window) for length in lengths]
        if max(visible) * len(visible) - sum(visible) <= _MAX_WASTED_TOKENS:
            return [self._group(None, lengths, window)]
        order = sorted(range(len(lengths)), key=lambda row: -visible[row])
        groups: list[list[int]] = [[]]
        wasted = 0
        for row in order:
            if groups[-1]:
                wasted += visible[groups[-1][0]] - visible[row]
            if wasted > _MAX_WASTED_TOKENS:
                groups.append([])
                wasted = 0
            groups[-1].append(row)
        return [self._group(rows, [lengths[row] for row in rows], window) for rows in groups]

    def _group(
        self, rows: list[int] | None, lengths: tuple[int, ...] | list[int], window: int | None
    ) -> DecodeGroup:
        size = self._block_size
        starts = [0 if window is None else max(length - window, 0) for length in lengths]
        first_blocks = [start // size for start in starts]
        counts = [
            -(-length // size) - first for length, first in zip(lengths, first_blocks, strict=True)
        ]
        queries = None if rows is None else torch.tensor(rows, device=self._device)
        tables = (
            self._batch.block_tables[: len(lengths)]
            if queries is None
            else (self._batch.block_tables.index_select(0, queries))
        )
        page_rows = self._page_rows(tables, first_blocks, counts)
        if len(lengths) == 1:
            first = first_blocks[0] * size
            return DecodeGroup(queries, page_rows, 1, starts[0] - first, lengths[0] - first, None)
        spans = torch.tensor((first_blocks, starts, lengths), device=self._device)
        positions = spans[0][:, None] * size + torch.arange(max(counts) * size, device=self._device)
        hidden = (positions < spans[1][:, None]) | (positions >= spans[2][:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        return DecodeGroup(
            queries, page_rows, len(lengths), 0, max(counts) * size, mask[:, None, None, :]
        )

    def _page_rows(self, tables: Tensor, first_blocks: list[int], counts: list[int]) -> Tensor:
        """Rows [2, num_seqs, num_kv_heads, num_pages], flat; short sequences repeat a block.

        The repeated block is the sequence's own, so nothing of another one is ever read.
        """
        columns = torch.arange(max(counts), device=self._device)
        if min(counts) == max(counts) and not any(first_blocks):
            picked = tables[:, : max(counts)].long()
        else:
            spans = torch.tensor((first_blocks, counts), device=self._device)
            columns = torch.minimum(columns, spans[1][:, None] - 1) + spans[0][:, None]
            picked = tables.gather(1, columns).long()
        pages = (picked * self._pages_per_block)[None, :, None, :] + self._page_offsets
        return pages.flatten()

    def chunks(self, window: int | None) -> list[Chunk]:
        batch = self._batch
        chunks = []
        start = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            end = start + batch.query_lens[row]
            chunks.append(self._chunk(row, start, end, window))
            start = end
        return chunks

    def _chunk(self, row: int, start: int, end: int, window: int | None) -> Chunk:
        length = self._batch.context_lens_host[row]
        cached = length - (end - start)
        reach = 0 if window is None else max(cached - window + 1, 0)  # first key any query sees
        if cached == 0:
            mask = None if window is None or length <= window else self._mask(0, 0, length, window)
            return Chunk(start, end, None, 0, length, mask)
        size = self._block_size
        first_block, num_blocks = reach // size, -(-length // size)
        tables = self._batch.block_tables[row : row + 1]
        page_rows = self._page_rows(tables, [first_block], [num_blocks - first_block])
        base = first_block * size
        mask = self._mask(reach, cached, length, window)
        return Chunk(start, end, page_rows, reach - base, length - base, mask)

    def _mask(self, first_key: int, first_query: int, end: int, window: int | None) -> Tensor:
        keys = torch.arange(first_key, end, device=self._device)
        queries = torch.arange(first_query, end, device=self._device)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))
