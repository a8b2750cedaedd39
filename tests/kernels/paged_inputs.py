"""Random queries, keys and values over a shuffled paged cache whose free blocks are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.kv_pages import KVFormat, KVPages, format_of, new_pages, pages_of
from disagg.kernels.ops import IndexQueries, TokenIndex

if TYPE_CHECKING:  # imports Triton
    from disagg.kernels.gpu.attention_work import AttentionWork

NUM_LAYERS = 2
NAN_BYTE = 0xFF  # repeated, a NaN in every format and in its scales
LAYER = 1


@dataclass(frozen=True)
class PagedInputs:
    """The fields that kernels read of a batch, with `qkv` and a cache that holds the past."""

    qkv: Tensor  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    kv_cache: KVPages
    slots: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    table_rows: Tensor | None = None
    num_evicted: int = 0  # tokens of each sequence whose KV was given up

    @property
    def positions(self) -> Tensor:
        spans = zip(self.context_lens_host, self.query_lens, strict=True)
        kept = torch.cat([torch.arange(length - num, length) for length, num in spans])
        return kept + self.num_evicted

    @property
    def num_decodes(self) -> int:
        return sum(length == 1 for length in self.query_lens)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    def work(
        self, group: int, window: int | None, num_programs: int, long_rows: int = 128
    ) -> AttentionWork:
        """Its attention, cut."""
        from disagg.kernels.gpu.attention_work import MAX_SHORT_ROWS, attention_work

        short_queries = max(n for n in (0, *self.query_lens) if n * group <= MAX_SHORT_ROWS)
        work = attention_work(
            len(self.query_lens),
            sum(self.query_lens),
            group,
            window,
            num_programs,
            self.qkv.device,
            short_queries=short_queries,
            has_long=max(self.query_lens) > short_queries,
            long_rows=long_rows,
        )
        work.cut(self.query_start, self.context_lens, sum(self.query_lens))
        return work

    def write(self) -> None:
        """Keys and values to the cache, by the reference.

        The kernel, which has tests of its own, takes most of the time of an interpreted step.
        """
        reference.kv_write(self.qkv, self.kv_cache, LAYER, self.slots)

    def expected(
        self,
        window: int | None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        cap: float | None = None,
        chosen: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """What the reference makes of a copy of the cache: [num_tokens, heads * head_dim]."""
        cache = copy_of(self.kv_cache)
        reference.kv_write(self.qkv, cache, LAYER, self.slots)
        num_heads = self.qkv.shape[1] - cache.num_vectors * cache.values.shape[3]
        out = reference.paged_attention(
            self.qkv[:, :num_heads],
            cache,
            LAYER,
            self.block_tables,
            self.query_lens,
            self.context_lens_host,
            window,
            sinks,
            scale,
            cap,
            chosen,
        )
        return out.flatten(1)


@dataclass(frozen=True)
class ChosenInputs:
    """Latents, and an index whose scores are whole numbers: they are exact, and many are equal.

    Attributes:
        chosen: by sequence, what the reference chooses, [num_queries, num_keys].
    """

    inputs: PagedInputs
    index: TokenIndex
    asked: IndexQueries
    chosen: list[Tensor]

    def expected(self, rank: int, scale: float) -> Tensor:
        """What the reference makes of the chosen tokens: [num_tokens, num_heads, rank]."""
        qkv, cache = self.inputs.qkv.clone(), copy_of(self.inputs.kv_cache)
        for stored in (qkv, cache.values):  # keys of the index are no keys of heads
            stored[..., -self.index.key_dim :] = 0.0
        plain = replace(self.inputs, qkv=qkv, kv_cache=cache)
        found = plain.expected(None, scale=scale, chosen=self.chosen)
        return found.view(*qkv[:, :-1].shape)[..., :rank]

    def assert_chosen(self, chosen: Tensor) -> None:
        """Of each token its positions in order; behind these, whatever it is."""
        found = iter(chosen.tolist())
        for wanted in (row for each in self.chosen for row in each):
            places = wanted.nonzero()[:, 0].tolist()
            assert next(found)[: len(places)] == places


def chosen_inputs(
    lens: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    key_dim: int,
    head_dim: int,
    index: TokenIndex,
    index_heads: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    with_nan: bool = False,
) -> ChosenInputs:
    """Draw latents, of which `key_dim` values are the key of heads, and an index.

    with_nan: in the first sequence the key of the first token in the index is NaN, and of the
        queries one is, and one has infinite weights.
    """
    inputs = paged_inputs(
        lens, group=num_heads, num_kv_heads=1, head_dim=head_dim, block_size=block_size,
        dtype=dtype, num_vectors=1,
    )  # fmt: skip
    assert key_dim + index.key_dim == head_dim
    for stored in (inputs.kv_cache.values, inputs.qkv):
        stored[..., key_dim:] = stored[..., key_dim:].round()
    generator, num_tokens = torch.Generator().manual_seed(4), len(inputs.qkv)
    shape = num_tokens, index_heads, index.key_dim
    queries = torch.randint(-1, 2, shape, generator=generator).to(dtype)
    weights = torch.randint(-2, 3, shape[:2], generator=generator).float()
    if with_nan:
        first = inputs.block_tables[0, 0]
        inputs.kv_cache.values[first, LAYER, :, :, 0, key_dim:] = torch.nan
        queries[1], weights[2] = torch.nan, -torch.inf
    asked, cache = IndexQueries(queries, weights), copy_of(inputs.kv_cache)
    reference.kv_write(inputs.qkv, cache, LAYER, inputs.slots)
    chosen, start = [], 0
    for row, (query_len, length) in enumerate(lens):
        own = slice(start, start := start + query_len)
        blocks = inputs.block_tables[row, : -(-length // block_size)].long()
        keys = cache.values[blocks, LAYER, 0, 0].flatten(0, 1)[:length, key_dim:]
        of_sequence = IndexQueries(queries[own], weights[own])
        chosen.append(reference.choose_tokens(of_sequence, keys, index.num_chosen))
    return ChosenInputs(inputs, index, asked, chosen)


def copy_of(pages: KVPages) -> KVPages:
    _, num_layers, num_vectors, num_kv_heads, block_size, _ = pages.values.shape
    memory = pages.blocks.view(torch.uint8).flatten().clone()
    heads = num_layers, num_kv_heads, block_size, pages.head_dim, num_vectors
    return pages_of(memory, pages.format, *heads)


def paged_inputs(
    lens: Sequence[tuple[int, int]],
    *,
    group: int = 1,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    format: KVFormat | None = None,
    begun_blocks_are_clean: bool = False,
    num_vectors: int = 2,
) -> PagedInputs:
    """Draw inputs for sequences of (query_len, context_len); single queries come first.

    The cache is of `format`, or of `dtype`. Only what earlier steps would have written is finite;
    the rest of every block is NaN, scales included, save with `begun_blocks_are_clean`: there,
    those steps zeroed the blocks that they began. One vector a token: a latent.
    """
    generator = torch.Generator().manual_seed(0)
    counts = [-(-context // block_size) for _, context in lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    heads = (NUM_LAYERS, num_kv_heads, block_size, head_dim)
    stored = format or format_of(dtype)
    kv_cache = new_pages(stored, num_blocks, *heads, torch.device("cpu"), num_vectors)
    kv_cache.blocks.view(torch.uint8).fill_(NAN_BYTE)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    slots = []
    for row, (query_len, context_len) in enumerate(lens):
        blocks = [order.pop() for _ in range(counts[row])]
        tables[row, : counts[row]] = torch.tensor(blocks)
        own = [blocks[p // block_size] * block_size + p % block_size for p in range(context_len)]
        past = own[: context_len - query_len]
        if begun_blocks_are_clean:
            kv_cache.blocks[[slot // block_size for slot in past]] = 0
        drawn = torch.randn(len(past), num_vectors * num_kv_heads, head_dim, generator=generator)
        reference.kv_write(drawn.to(dtype), kv_cache, LAYER, torch.tensor(past))
        slots += own[context_len - query_len :]
    num_heads = (group + num_vectors) * num_kv_heads
    query_lens = [query_len for query_len, _ in lens]
    contexts = tuple(context_len for _, context_len in lens)
    return PagedInputs(
        qkv=torch.randn(len(slots), num_heads, head_dim, generator=generator).to(dtype),
        kv_cache=kv_cache,
        slots=torch.tensor(slots),
        query_start=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        query_lens=tuple(query_lens),
        context_lens_host=contexts,
    )
