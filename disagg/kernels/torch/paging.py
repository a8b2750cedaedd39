"""Which pages of a cache a step's attention reads and writes, for `attention`.

The cache is viewed as pages, one row each (`KVPages.rows`). Page numbers are for layer 0; a layer
adds its offset. All index arithmetic happens once per step (`plan_paging`), not once per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.cpu.prompts import PromptChunks, chunks_of
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch

_MAX_WASTED_TOKENS = 512  # if a group of decodes has more padding, another group is cheaper
_MAX_GATHERED_NBYTES = 16 << 20  # of a group; more would not fit into the CPU's cache
PIECE_TOKENS = 256  # queries of a prompt that share one mask


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """The pages that are gathered for some sequences, and the positions to which these attend."""

    pages: Tensor  # int64 [num_vectors * num_seqs * num_kv_heads * num_blocks]
    gathered: Tensor  # scratch memory to which they are copied, one row each
    rows: Tensor  # `gathered` as [num_vectors, num_seqs, num_kv_heads, num_blocks, *]
    seen: slice  # the gathered positions to which some query attends
    mask: Tensor | None  # added to the scores; None: every query attends to all of `seen`

    def keys_and_values(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values [num_seqs, num_kv_heads, num_keys, head_dim], without scales."""
        seen = self.rows.view(*self.rows.shape[:3], -1, head_dim)[:, :, :, self.seen]
        return seen[0], seen[-1]  # the same tensor if the cache keeps latents


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences whose attention is computed together."""

    queries: Tensor | None  # int64 [num_seqs]: their token rows; None: all decodes, in order
    keys: CachedKeys


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens [start, end) of one sequence."""

    start: int
    end: int
    keys: CachedKeys | None  # None: causal attention within the chunk


@dataclass(frozen=True, slots=True)
class TorchPaging:
    """The rows that the layers of one step write and read."""

    # Where the step's vectors are written, [num_tokens, num_vectors * num_kv_heads]: for a cache
    # with scales (pages, offsets in pages), otherwise row numbers in the cache as [*, head_dim].
    write_rows: tuple[Tensor, ...]
    groups: dict[int | None, list[DecodeGroup]]  # by window
    chunks: dict[int | None, list[Chunk]]
    num_decodes: int
    scratch: Tensor  # rows like the cache's, into which pages are gathered
    prompts: PromptChunks | None  # chunks that compiled code computes instead of `chunks`


def plan_paging(
    batch: PagedBatch,
    kv_cache: KVPages,
    windows: Iterable[int | None],
    scratch: Tensor,
    *,
    is_compiled: bool,
) -> TorchPaging:
    """Derive the rows to write and to read, for every window size in use.

    Args:
        scratch: scratch memory of an earlier step, which is used again if it is large enough.
        is_compiled: whether compiled code computes the attention of prompts.
    """
    _clear_begun_blocks(batch, kv_cache)
    planner = _Planner(batch, kv_cache, scratch)
    unique = set(windows)
    groups = {window: planner.groups(window) for window in unique}
    chunks = {window: [] if is_compiled else planner.chunks(window) for window in unique}
    has_prompts = batch.num_decodes < len(batch.query_lens)
    prompts = chunks_of(batch) if is_compiled and has_prompts else None
    return TorchPaging(
        planner.write_rows(), groups, chunks, batch.num_decodes, planner.scratch, prompts
    )


def _clear_begun_blocks(batch: PagedBatch, kv_cache: KVPages) -> None:
    """Zero the blocks that this step begins and does not fill.

    A group reads whole blocks and masks their unwritten ends, but a NaN that an earlier owner left
    there would survive the mask (0 * NaN is NaN). The worker that began an imported block has
    cleared it in the same way.
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

    def __init__(self, batch: PagedBatch, kv_cache: KVPages, scratch: Tensor) -> None:
        _, _, self._num_vectors, self._num_kv_heads, self._block_size, _ = kv_cache.values.shape
        self._batch = batch
        self._has_scales = kv_cache.scales is not None
        self._mask_dtype = torch.float32 if self._has_scales else kv_cache.values.dtype
        self._device = kv_cache.values.device
        self._pages_per_block = kv_cache.head_pages * self._num_kv_heads
        heads = torch.arange(self._num_kv_heads, device=self._device) * kv_cache.head_pages
        # Keys of all heads, then values.
        self._page = torch.cat([heads + vector for vector in range(self._num_vectors)])
        rows = kv_cache.rows
        block_nbytes = len(self._page) * rows.shape[1] * rows.itemsize
        self._most_tokens = _MAX_GATHERED_NBYTES // block_nbytes * self._block_size
        fits = scratch.dtype == rows.dtype and scratch.shape[1] == rows.shape[1]
        self.scratch = scratch if fits else rows.new_empty(0, rows.shape[1])

    def write_rows(self) -> tuple[Tensor, ...]:
        slots, size = self._batch.slots, self._block_size
        blocks = slots.div(size, rounding_mode="floor")
        pages = (blocks * self._pages_per_block)[:, None] + self._page
        offsets = (slots - blocks * size)[:, None]
        return (pages, offsets) if self._has_scales else (pages * size + offsets,)

    def groups(self, window: int | None) -> list[DecodeGroup]:
        """Divide the decodes, longest first, so that padding costs no more than another group."""
        lengths = self._batch.context_lens_host[: self._batch.num_decodes]
        if not lengths:
            return []
        tables = self._batch.block_tables
        seen = [length if window is None else min(length, window) for length in lengths]
        if (
            max(seen) * len(seen) - sum(seen) <= _MAX_WASTED_TOKENS
            and max(seen) * len(seen) <= self._most_tokens
        ):
            return [DecodeGroup(None, self._decode_keys(tables[: len(seen)], lengths, window))]
        cuts: list[list[int]] = [[]]
        wasted = 0
        for row in sorted(range(len(seen)), key=lambda row: -seen[row]):
            longest = seen[cuts[-1][0]] if cuts[-1] else 0
            wasted += max(longest - seen[row], 0)
            if wasted > _MAX_WASTED_TOKENS or longest * (len(cuts[-1]) + 1) > self._most_tokens:
                cuts.append([])
                wasted = 0
            cuts[-1].append(row)
        groups = []
        for rows in cuts:
            queries = torch.tensor(rows, device=self._device)
            own = [lengths[row] for row in rows]
            cached = self._decode_keys(tables.index_select(0, queries), own, window)
            groups.append(DecodeGroup(queries, cached))
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
            return self._cached(pages, 1, slice(starts[0] - base, lengths[0] - base), None)
        num_keys = max(counts) * size
        bounds = torch.tensor((skipped, starts, lengths), device=self._device)
        positions = bounds[0, :, None] * size + torch.arange(num_keys, device=self._device)
        hidden = (positions < bounds[1, :, None]) | (positions >= bounds[2, :, None])
        mask = self._mask(hidden)[:, None, None]
        return self._cached(pages, len(lengths), slice(0, num_keys), mask)

    def _cached(self, pages: Tensor, num_seqs: int, seen: slice, mask: Tensor | None) -> CachedKeys:
        num_pages = pages.shape[0]
        if self.scratch.shape[0] < num_pages:
            self.scratch = self.scratch.new_empty(num_pages + num_pages // 4, self.scratch.shape[1])
        gathered = self.scratch[:num_pages]
        dims = (self._num_vectors, num_seqs, self._num_kv_heads)
        rows = gathered.view(*dims, -1, gathered.shape[1])
        return CachedKeys(pages, gathered, rows, seen, mask)

    def _pages(self, tables: Tensor, skipped: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Pages [num_vectors, num_seqs, num_kv_heads, num_blocks], flat.

        Short sequences repeat one of their own blocks, so no block of another sequence is read.
        """
        most = max(counts)
        if min(counts) == most and not any(skipped):
            picked = tables[:, :most]
        else:
            bounds = torch.tensor((skipped, counts), device=self._device)
            columns = torch.arange(most, device=self._device).minimum(bounds[1, :, None] - 1)
            picked = tables.gather(1, columns + bounds[0, :, None])
        first = (picked.long() * self._pages_per_block)[None, :, None, :]
        return (first + self._page.view(self._num_vectors, 1, -1, 1)).flatten()

    def chunks(self, window: int | None) -> list[Chunk]:
        """The chunks of all prompts, cut so that no mask grows with the square of a prompt."""
        batch = self._batch
        chunks = []
        end = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            start, end = end, end + batch.query_lens[row]
            length = batch.context_lens_host[row]
            # With scales even a prompt's own keys are read as they are stored, because the result
            # must not depend on how a prompt was cut.
            fresh = length == end - start and not self._has_scales
            if fresh and (window is None or length <= window):
                chunks.append(Chunk(start, end, None))
                continue
            for piece in range(start, end, PIECE_TOKENS):
                stop = min(piece + PIECE_TOKENS, end)
                span = (length - (end - piece), length - (end - stop))
                chunks.append(Chunk(piece, stop, self._chunk_keys(row, span, window)))
        return chunks

    def _chunk_keys(self, row: int, span: tuple[int, int], window: int | None) -> CachedKeys:
        """The keys for the queries at positions [span[0], span[1])."""
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
        return self._cached(pages, 1, slice(first_key - base, end - base), self._mask(hidden))

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._mask_dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))
