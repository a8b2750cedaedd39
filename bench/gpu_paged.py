"""Sequences in a paged cache as in an engine, and the attention of their step.

Attention is called through `TritonOps`, as a decoder does, so the benches time and compare what a
layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.gpu.attention_work import LONG_ROWS
from disagg.kernels.gpu.ops import TritonOps, TritonPaging
from disagg.kernels.kv_pages import KVFormat, KVPages, format_of, new_pages, pages_of
from disagg.kernels.ops import IndexQueries, Scores, TokenIndex
from disagg.models.batch import Batch

INTERPRETED_MULTIPROCESSORS = 2
INTERPRETED_DTYPE = torch.float32  # Triton's interpreter knows no bfloat16


@dataclass(frozen=True)
class Heads:
    """By default those of Llama-3-8B.

    rank: first values of a latent, which are summed up; 0: keys and values.
    index: chooses the tokens that a query attends to, with so many heads of its own.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    num_layers: int = 2
    rank: int = 0
    index: TokenIndex | None = None
    index_heads: int = 64

    @property
    def num_vectors(self) -> int:
        return 1 if self.rank else 2

    @property
    def value_dim(self) -> int:
        return self.rank or self.head_dim

    def token_nbytes(self, format: KVFormat) -> float:
        """Keys and values of one position in one layer, with its scales."""
        page_nbytes = format.page_nbytes(self.block_size, self.head_dim)
        return self.num_vectors * self.num_kv_heads * page_nbytes / self.block_size

    def uncached(self, num_tokens: int, format: KVFormat, nbytes: float) -> Heads:
        """With as many layers as it takes for `nbytes` of the KV of so many tokens."""
        layer_nbytes = num_tokens * self.token_nbytes(format)
        return replace(self, num_layers=max(2, min(128, round(nbytes / layer_nbytes))))


TINY = Heads(4, 2, 32, 16, 2)
LATENT = Heads(16, 1, 576, rank=512)  # of DeepSeek-V3, on one of eight ranks
TINY_LATENT = Heads(4, 1, 24, 16, 2, rank=16)
CHOSEN = Heads(16, 1, 704, rank=512, index=TokenIndex(2048, 128))  # of DeepSeek-V3.2, as `LATENT`
TINY_CHOSEN = Heads(4, 1, 32, 16, 2, rank=16, index=TokenIndex(16, 8), index_heads=5)


class Paged:
    """Sequences in a cache with shuffled blocks.

    Args:
        lens: of each sequence, the tokens of the step and those with KV once it is done.
        is_captured: the step is a decode step as graphs have it.
        long_rows: of `TritonOps`.
    """

    def __init__(
        self,
        heads: Heads,
        lens: list[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        window: int | None = None,
        format: KVFormat | None = None,
        *,
        is_captured: bool = False,
        long_rows: int = LONG_ROWS,
    ) -> None:
        self.heads, self.lens, self.window = heads, lens, window
        counts = [-(-context // heads.block_size) for _, context in lens]
        self.pages = new_pages(
            format or format_of(dtype),
            sum(counts),
            heads.num_layers,
            heads.num_kv_heads,
            heads.block_size,
            heads.head_dim,
            device,
            heads.num_vectors,
        )
        self._fill(device)
        self.batch = batch = _batch(heads, lens, _tables(counts), device)
        num_heads = heads.num_heads + heads.num_vectors * heads.num_kv_heads
        shape = (len(batch.token_ids), num_heads, heads.head_dim)
        self.qkv = torch.randn(shape, device=device).to(dtype)
        self.asked = self._ask()
        self._ops = TritonOps(
            heads.num_heads,
            _num_multiprocessors(device),
            long_rows=long_rows,
            scores=Scores(index=heads.index),
        )
        self._paging: TritonPaging
        if is_captured:
            fixed = self._ops.plan_graph(batch, self.pages, [window], are_decodes=True)
            fixed.cut()
            self._paging = fixed
        else:
            self._paging = self._ops.plan(batch, self.pages, [window])

    def _ask(self) -> IndexQueries | None:
        """Whole numbers, so that all scores are exact and their order is known."""
        heads, device = self.heads, self.qkv.device
        if heads.index is None:
            return None
        of_index = self.qkv[..., -heads.index.key_dim :]
        of_index[:, :-1] = 0  # are read by the reference alone
        of_index[:, -1] = of_index[:, -1].round()
        shape = len(self.qkv), heads.index_heads, heads.index.key_dim
        queries = torch.randint(-1, 2, shape, device=device).to(self.qkv.dtype)
        weights = torch.randint(-2, 3, shape[:2], device=device).float()
        if len(queries) > 3:  # what chooses must not leave its tensors then
            queries[0], queries[-2], weights[-3] = torch.nan, torch.nan, -torch.inf
        return IndexQueries(queries, weights)

    def _fill(self, device: torch.device) -> None:
        """Keys and values of one block, in all of them, times what differs from block to block."""
        values, scales = self.pages.values, self.pages.scales
        factor = 1 + torch.arange(len(values), device=device).view(-1, 1, 1, 1, 1) % 7 * 0.1
        drawn = torch.randn(*values.shape[1:5], self.heads.head_dim, device=device)
        if scales is None:
            values.copy_(drawn.to(values.dtype).expand_as(values))
            values *= factor.unsqueeze(-1)
            if self.heads.index is not None:
                values[..., -self.heads.index.key_dim :].round_()
            return
        stored, of_vector = reference.quantize(drawn, self.pages.format)
        values.view(torch.int8).copy_(stored.view(torch.int8).expand_as(values))
        scales.copy_(of_vector * factor)

    def attend(self, layer: int) -> Tensor:
        """Store the step's keys and values, then attend: [num_tokens, num_heads * value_dim]."""
        heads = self.heads
        if heads.rank:
            numbers = heads.rank, heads.head_dim**-0.5
            where = self.qkv, self.pages, layer, self._paging
            return self._ops.latent_attention(*where, *numbers, self.asked).flatten(1)
        return self._ops.attention(self.qkv, self.pages, layer, self.window, self._paging)

    def attend_all(self) -> None:
        for layer in range(self.heads.num_layers):
            self.attend(layer)

    def pages_on_cpu(self) -> KVPages:
        """A copy."""
        heads = self.heads
        return pages_of(
            self.pages.blocks.cpu().clone().view(torch.uint8).flatten(),
            self.pages.format,
            heads.num_layers,
            heads.num_kv_heads,
            heads.block_size,
            heads.head_dim,
            heads.num_vectors,
        )

    def difference(self, num_seqs: int = 4, num_rows: int = 64) -> float:
        """Of `attend` from the reference, as a fraction of the largest value.

        Compares the last `num_rows` tokens of so many sequences, from first to last.
        """
        got = self.attend(0).view(len(self.qkv), self.heads.num_heads, -1)
        every = max(1, len(self.lens) // num_seqs)
        largest, worst, chosen = 0.0, 0.0, None
        for row in range(0, len(self.lens), every):
            query, context = self.lens[row]
            end = sum(query for query, _ in self.lens[: row + 1])
            rows = slice(end - min(query, num_rows), end)
            if self.asked is not None:
                chosen = [self._check_chosen(self.asked, row, rows, context)]
            wanted = reference.paged_attention(
                self.qkv[rows, : self.heads.num_heads],
                self.pages,
                0,
                self.batch.block_tables[row : row + 1],
                [rows.stop - rows.start],
                [context],
                self.window,
                chosen=chosen,
            )
            wide = wanted.float()[..., : self.heads.value_dim]
            worst = max(worst, float((got[rows].float() - wide).abs().max()))
            largest = max(largest, float(wide.abs().max()))
        return worst / max(largest, 1e-6)

    def _check_chosen(self, asked: IndexQueries, row: int, rows: slice, context: int) -> Tensor:
        """What the reference chooses in layer 0 for some tokens of a sequence.

        Raises:
            ValueError: the kernels have chosen other tokens.
        """
        index, choice = self.heads.index, self._paging.choice
        assert index is not None
        blocks = self.batch.block_tables[row, : -(-context // self.heads.block_size)].long()
        keys = self.pages.values[blocks, 0, 0, 0].flatten(0, 1)[:context, -index.key_dim :]
        own = IndexQueries(asked.queries[rows], asked.weights[rows])
        wanted = reference.choose_tokens(own, keys, index.num_chosen)
        if choice is None:  # all that is seen is chosen
            return wanted
        seen = wanted.sum(-1, keepdim=True)
        is_one = torch.arange(index.num_chosen, device=seen.device) < seen
        if not torch.equal(choice.chosen[rows][is_one].long(), wanted.nonzero()[:, 1]):
            raise ValueError(f"other tokens of {context} are chosen than the reference chooses")
        return wanted


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _tables(counts: list[int]) -> Tensor:
    """[num_seqs, most blocks]: a shuffled block of its own for each entry that is used."""
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, ids in enumerate(torch.split(order, counts)):
        tables[row, : len(ids)] = ids
    return tables


def _batch(
    heads: Heads, lens: list[tuple[int, int]], tables: Tensor, device: torch.device
) -> Batch:
    positions = [torch.arange(context - query, context) for query, context in lens]
    slots = [
        tables[row].long()[each // heads.block_size] * heads.block_size + each % heads.block_size
        for row, each in enumerate(positions)
    ]
    query_lens, context_lens = zip(*lens, strict=True)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return Batch(
        token_ids=torch.zeros(sum(query_lens), dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        query_start=starts.int().to(device),
        context_lens=torch.tensor(context_lens).int().to(device),
        block_tables=tables.to(device),
        logits_rows=starts[1:].to(device) - 1,
        num_decodes=sum(query == 1 for query in query_lens),
        max_query_len=max(query_lens),
        query_lens=query_lens,
        context_lens_host=context_lens,
    )
