"""Small steps with prompts or drafts as captured CUDA graphs, in addition to `decode_graphs`.

A device computes a short prompt, or verifies drafts, faster than the host can launch the kernels
one by one. These graphs are captured for some numbers of tokens, however the sequences divide them.
Unused tokens belong to no sequence and write nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.engine.device.decode_graphs import Record, capture_sizes
from disagg.engine.sched.speculation import MAX_AHEAD
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.kv_pages import KVPages
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder

# With more tokens the device needs longer to compute than the host to launch. Not yet measured.
MAX_PROMPT_TOKENS = 256
TOKENS_APART = 32


class MixedSize(NamedTuple):
    """The numbers of a graph's tokens and rows of logits. If equal, every token has a row."""

    num_tokens: int
    num_logits: int

    def holds(self, batch: Batch) -> bool:
        num_tokens, num_logits = batch.token_ids.shape[0], batch.logits_rows.shape[0]
        if num_tokens > self.num_tokens:
            return False
        if self.num_logits == self.num_tokens:
            return num_logits == num_tokens
        return num_logits <= self.num_logits


def mixed_sizes(max_num_seqs: int, with_drafts: bool) -> list[MixedSize]:
    """The sizes to capture.

    In steps with prompts few tokens need logits; in steps that verify drafts every token does.
    """
    sizes = [MixedSize(n, n // 2) for n in _nums_tokens(MAX_PROMPT_TOKENS)]
    if with_drafts:
        sizes += [MixedSize(n, n) for n in _nums_tokens(max_num_seqs + MAX_AHEAD)]
    return sorted(sizes)


def _nums_tokens(most: int) -> list[int]:
    return [16, *range(TOKENS_APART, most, TOKENS_APART), most]


def graph_sizes(max_num_seqs: int, with_drafts: bool) -> list[int]:
    """The number of tokens of each graph that a runner captures."""
    mixed = [size.num_tokens for size in mixed_sizes(max_num_seqs, with_drafts)]
    return capture_sizes(max_num_seqs) + mixed


class MixedGraphs:
    """A decoder's steps with few tokens, as captured graphs.

    Args:
        decoder: a decoder on `TritonOps`.
        kv_cache: its cache. Capturing changes nothing in it.
        max_num_seqs: most sequences of one step.
        max_num_blocks: most blocks of one sequence.
        logits: float32 [num_rows, num_logits], which every step overwrites; it has the rows of the
            largest size.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVPages,
        sizes: Iterable[MixedSize],
        max_num_seqs: int,
        max_num_blocks: int,
        record: Record,
        logits: Tensor,
    ) -> None:
        self._sizes = sorted(sizes)
        self._logits = logits
        largest = self._sizes[-1].num_tokens
        self._max_num_seqs = min(largest, max_num_seqs)
        # Unused tokens belong to one additional row.
        rows = largest, self._max_num_seqs + 1, max_num_blocks
        self._batch = _empty_batch(*rows, decoder.device)
        graphs = [
            _MixedGraph(decoder, kv_cache, self._first(size), logits[: size.num_logits], record)
            for size in self._sizes[::-1]  # the largest first: the others reuse its memory
        ]
        self._graphs = graphs[::-1]

    def forward(self, batch: Batch) -> Tensor | None:
        """As `Decoder.forward`; None for a step that has no graph.

        The logits are overwritten by the next step.
        """
        if len(batch.query_lens) > self._max_num_seqs:
            return None
        for size, graph in zip(self._sizes, self._graphs, strict=True):
            if size.holds(batch):
                self._fill(batch, size)
                graph.replay()
                return self._logits[: batch.logits_rows.shape[0]]
        return None

    def _first(self, size: MixedSize) -> Batch:
        """A batch of this size in the tensors of the largest size."""
        num_tokens, num_logits = size
        own, num_seqs = self._batch, min(num_tokens, self._max_num_seqs) + 1
        return replace(
            own,
            token_ids=own.token_ids[:num_tokens],
            positions=own.positions[:num_tokens],
            slots=own.slots[:num_tokens],
            query_start=own.query_start[: num_seqs + 1],
            context_lens=own.context_lens[:num_seqs],
            block_tables=own.block_tables[:num_seqs],
            logits_rows=own.logits_rows[:num_logits],
        )

    def _fill(self, batch: Batch, size: MixedSize) -> None:
        """Copy a step to the tensors that the graph of this size reads."""
        own, num_seqs = self._batch, len(batch.query_lens)
        num_tokens, num_logits = batch.token_ids.shape[0], batch.logits_rows.shape[0]
        own.token_ids[:num_tokens].copy_(batch.token_ids)
        own.positions[:num_tokens].copy_(batch.positions)
        own.slots[:num_tokens].copy_(batch.slots)
        # From an earlier step: nothing is written, and equal tokens go to the same experts.
        own.slots[num_tokens : size.num_tokens].fill_(-1)
        own.token_ids[num_tokens : size.num_tokens].fill_(0)
        own.query_start[: num_seqs + 1].copy_(batch.query_start)
        own.query_start[num_seqs + 1 :].fill_(size.num_tokens)
        own.context_lens[:num_seqs].copy_(batch.context_lens)
        own.context_lens[num_seqs:].fill_(0)
        own.block_tables[:num_seqs, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        own.logits_rows[:num_logits].copy_(batch.logits_rows)
        # An earlier step may have had rows that this graph does not have.
        own.logits_rows[num_logits : size.num_logits].fill_(0)


class _MixedGraph:
    """A graph for steps with at most the tokens, sequences and rows of logits of `batch`."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVPages, batch: Batch, logits: Tensor, record: Record
    ) -> None:
        ops = decoder.ops
        if not isinstance(ops, TritonOps):
            raise TypeError(f"CUDA graphs need a decoder on TritonOps, not {type(ops).__name__}")
        paging = ops.plan_graph(batch, kv_cache, decoder.config.sliding_windows, are_decodes=False)

        def forward() -> None:
            paging.cut()
            decoder.forward(batch, kv_cache, paging, logits)

        self.replay = record(forward)


def _empty_batch(
    num_tokens: int, num_seqs: int, max_num_blocks: int, device: torch.device
) -> Batch:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    query_start = zeros(num_seqs + 1)
    query_start[1:].fill_(num_tokens)  # all tokens are those of no sequence
    return Batch(
        token_ids=zeros(num_tokens, dtype=torch.int64),
        positions=zeros(num_tokens, dtype=torch.int64),
        slots=zeros(num_tokens, dtype=torch.int64).fill_(-1),
        query_start=query_start,
        context_lens=zeros(num_seqs),
        block_tables=zeros(num_seqs, max_num_blocks),
        logits_rows=zeros(num_tokens, dtype=torch.int64),
        num_decodes=0,
        max_query_len=num_tokens,
        query_lens=(),
        context_lens_host=(),
    )
