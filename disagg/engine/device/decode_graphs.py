"""Decode steps as captured CUDA graphs: one launch instead of hundreds.

The kernels of a small decode step run faster than the host can launch them one by one. A graph
replays all of them, with the addresses and grids of its capture. So graphs are captured for some
batch sizes. A step uses the next larger graph, whose unused rows write nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from disagg.kernels.gpu.decode_inputs import DecodeInputs
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.kv_pages import KVPages
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder

Replay: TypeAlias = Callable[[], object]
# Runs a function once, and returns a function that repeats it on the same tensors.
Record: TypeAlias = Callable[[Callable[[], object]], Replay]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to capture, so that no step has many unused rows, without too many graphs."""
    sizes = {1, 2, 4, *range(8, min(max_num_seqs, 256), 8), *range(256, max_num_seqs, 32)}
    return sorted(size for size in sizes | {max_num_seqs} if size <= max_num_seqs)


def record_cuda_graph() -> Record:
    """A function that captures graphs on the current device. They share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(forward: Callable[[], object]) -> Replay:
        forward()  # compiles and loads kernels, which is not allowed during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of a worker may call CUDA during the capture, as the transport does.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            forward()
        return graph.replay

    return record


def new_logits(decoder: Decoder, num_rows: int) -> Tensor:
    """The tensor to which all graphs of a decoder write, with the rows of the largest graph."""
    shape = num_rows, decoder.num_logits
    return torch.zeros(shape, dtype=torch.float32, device=decoder.device)


class DecodeGraphs:
    """A decoder's steps of up to `max_num_seqs` sequences with one token each.

    All graphs read one batch, of the largest size, and write one tensor of logits. A step replays
    one of them, and its logits are used before the next replay.

    Args:
        decoder: a decoder on `TritonOps`.
        kv_cache: its cache. Capturing changes nothing in it.
        inputs: the tensors that the graphs read, for `max_num_seqs` sequences. A step whose tensors
            are these is not copied.
        logits: float32 [max_num_seqs or more, num_logits], which every step overwrites.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVPages,
        max_num_seqs: int,
        inputs: DecodeInputs,
        record: Record,
        logits: Tensor,
    ) -> None:
        inputs.slots.fill_(-1)  # capturing writes to no block of an earlier step
        self._batch = batch = _batch_in(inputs, max_num_seqs)
        self._logits = logits
        self._sizes = capture_sizes(max_num_seqs)
        # The largest is captured first, so that the others fit into the memory that it returned to
        # the pool.
        graphs = [
            _Graph(decoder, kv_cache, _first_rows(batch, n), self._logits[:n], record)
            for n in self._sizes[::-1]
        ]
        self._graphs = graphs[::-1]

    def forward(self, batch: Batch) -> Tensor | None:
        """As `Decoder.forward`; None for a step that has no graph.

        The logits are overwritten by the next step.
        """
        num_seqs = len(batch.query_lens)
        index = bisect_left(self._sizes, num_seqs)
        are_decodes = batch.max_query_len == 1 and batch.logits_rows.shape[0] == num_seqs
        if not are_decodes or index == len(self._sizes):
            return None
        if batch.token_ids.data_ptr() != self._batch.token_ids.data_ptr():
            self._fill(batch, self._sizes[index])
        self._graphs[index].replay()
        return self._logits[:num_seqs]

    def _fill(self, batch: Batch, size: int) -> None:
        """Copy a step to the tensors that the graph of `size` sequences reads."""
        own, num_seqs = self._batch, len(batch.query_lens)
        own.token_ids[:num_seqs].copy_(batch.token_ids)
        own.positions[:num_seqs].copy_(batch.positions)
        own.slots[:num_seqs].copy_(batch.slots)
        own.slots[num_seqs:size].fill_(-1)  # no KV of an earlier step's rows
        own.context_lens[:num_seqs].copy_(batch.context_lens)
        own.context_lens[num_seqs:size].fill_(0)
        own.block_tables[:num_seqs, : batch.block_tables.shape[1]].copy_(batch.block_tables)


class _Graph:
    """The steps of as many sequences as `batch` and `logits` have rows."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVPages, batch: Batch, logits: Tensor, record: Record
    ) -> None:
        ops = decoder.ops
        if not isinstance(ops, TritonOps):
            raise TypeError(f"CUDA graphs need a decoder on TritonOps, not {type(ops).__name__}")
        paging = ops.plan_graph(batch, kv_cache, decoder.config.sliding_windows, are_decodes=True)

        def forward() -> None:
            paging.cut()
            decoder.forward(batch, kv_cache, paging, logits)

        self.replay = record(forward)


def _first_rows(batch: Batch, num_seqs: int) -> Batch:
    """The first sequences of a batch of decodes, in its tensors."""
    return replace(
        batch,
        token_ids=batch.token_ids[:num_seqs],
        positions=batch.positions[:num_seqs],
        slots=batch.slots[:num_seqs],
        query_start=batch.query_start[: num_seqs + 1],
        context_lens=batch.context_lens[:num_seqs],
        block_tables=batch.block_tables[:num_seqs],
        logits_rows=batch.logits_rows[:num_seqs],
        num_decodes=num_seqs,
        query_lens=batch.query_lens[:num_seqs],
        context_lens_host=batch.context_lens_host[:num_seqs],
    )


def _batch_in(inputs: DecodeInputs, num_seqs: int) -> Batch:
    """A batch of decodes in these tensors."""
    token_ids, positions, slots, context_lens, block_tables = inputs.first(num_seqs)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=token_ids.device),
        context_lens=context_lens,
        block_tables=block_tables,
        logits_rows=torch.arange(num_seqs, device=token_ids.device),
        num_decodes=num_seqs,
        max_query_len=1,
        query_lens=(1,) * num_seqs,
        context_lens_host=(1,) * num_seqs,
    )
