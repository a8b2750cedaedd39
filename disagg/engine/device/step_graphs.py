"""Small steps as captured CUDA graphs: one launch instead of hundreds.

The kernels of a small step run faster than the host can launch them one by one. A graph replays all
of them, with the addresses and grids of its capture. So graphs are captured for some numbers of
tokens, and a step uses the next larger one, however its sequences divide the tokens. Unused tokens
belong to no sequence and write nothing.

Every rank of a worker captures the same graphs in the same order, because capturing computes each
step once, and its sums over ranks wait for all ranks. These sums are part of the graphs, so a step
is one launch on each rank, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from disagg.engine.device.batching import max_graph_tokens
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.step_arrays import StepArrays
from disagg.kernels.kv_pages import KVPages
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder

Replay: TypeAlias = Callable[[], object]
# Runs a function once, and returns a function that repeats it on the same tensors.
Record: TypeAlias = Callable[[Callable[[], object]], Replay]
TOKENS_APART = 32


class GraphSize(NamedTuple):
    """are_decodes: every sequence has one token, so no tile of many queries is needed."""

    are_decodes: bool
    num_tokens: int


def graph_sizes(max_num_seqs: int) -> list[GraphSize]:
    """The graphs that a runner captures: no step has many unused rows, and there are not too many
    graphs."""
    decodes = {1, 2, 4, *range(8, min(max_num_seqs, 256), 8), *range(256, max_num_seqs, 32)}
    decodes = {size for size in decodes if size < max_num_seqs} | {max_num_seqs}
    most = max_graph_tokens(max_num_seqs)
    others = {16, *range(TOKENS_APART, most, TOKENS_APART), most}
    return [GraphSize(False, size) for size in sorted(others)] + [
        GraphSize(True, size) for size in sorted(decodes)
    ]


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


class StepGraphs:
    """A decoder's small steps, as captured graphs.

    All graphs read the same tensors and write one tensor of logits, which has the rows of the
    largest. A step replays one of them, and its logits are used before the next replay.

    Args:
        decoder: a decoder on `TritonOps`.
        kv_cache: its cache. Capturing changes nothing in it.
        arrays, tables: the tensors that the graphs read; a step in other ones has no graph.
        sizes: from `graph_sizes`.
        record: captures a graph; by default on the current GPU.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVPages,
        arrays: StepArrays,
        tables: Tensor,
        sizes: list[GraphSize],
        record: Record | None = None,
    ) -> None:
        record = record or record_cuda_graph()
        self._arrays, self._tables = arrays, tables
        self._sizes = sorted(sizes)
        shape = max(size.num_tokens for size in sizes), decoder.num_logits
        self._logits = torch.zeros(shape, dtype=torch.float32, device=decoder.device)
        arrays.clear()
        # With LoRA each size has a second graph, so that steps without adapters lose nothing.
        self._replays: dict[bool, list[Replay]] = {}
        for has_adapters in (False,) if decoder.adapters is None else (True, False):
            self._replays[has_adapters] = self._recorded(
                record, decoder, kv_cache, has_adapters=has_adapters
            )

    def _recorded(
        self, record: Record, decoder: Decoder, kv_cache: KVPages, *, has_adapters: bool
    ) -> list[Replay]:
        """A graph of each size."""
        replays: dict[GraphSize, Replay] = {}
        # The largest is captured first, so that the others fit into the memory that it returned to
        # the pool.
        for size in sorted(self._sizes, key=lambda size: -size.num_tokens):
            batch = self._batch(size, has_adapters=has_adapters)
            replays[size] = record(self._forward_of(size, batch, decoder, kv_cache))
        return [replays[size] for size in self._sizes]

    def forward(self, batch: Batch) -> Tensor | None:
        """As `Decoder.forward`; None for a step that has no graph.

        The logits may be overwritten by the next step.
        """
        num_tokens, num_logits = batch.token_ids.shape[0], batch.logits_rows.shape[0]
        are_decodes = batch.max_query_len == 1 and num_logits == num_tokens
        index = bisect_left(self._sizes, GraphSize(are_decodes, num_tokens))
        if index == len(self._sizes) or self._sizes[index].are_decodes != are_decodes:
            return None
        ours = self._arrays.token_ids.data_ptr(), self._tables.data_ptr()
        if (batch.token_ids.data_ptr(), batch.block_tables.data_ptr()) != ours:
            return None  # the tables have grown, or the step is larger than the arrays
        self._replays[batch.adapters is not None][index]()
        logits = self._logits[:num_tokens]
        return logits if num_logits == num_tokens else logits.index_select(0, batch.logits_rows)

    def _forward_of(
        self, size: GraphSize, batch: Batch, decoder: Decoder, kv_cache: KVPages
    ) -> Callable[[], object]:
        ops = decoder.ops
        if not isinstance(ops, TritonOps):
            raise TypeError(f"CUDA graphs need a decoder on TritonOps, not {type(ops).__name__}")
        windows = decoder.config.sliding_windows
        paging = ops.plan_graph(batch, kv_cache, windows, are_decodes=size.are_decodes)
        logits = self._logits[: size.num_tokens]

        def forward() -> None:
            paging.cut()
            decoder.forward(batch, kv_cache, paging, logits)

        return forward

    def _batch(self, size: GraphSize, *, has_adapters: bool) -> Batch:
        """The arrays as a batch of so many tokens, which may have one sequence more: nobody's."""
        num_seqs = min(size.num_tokens, self._arrays.max_num_seqs) + 1
        return Batch(
            **self._arrays.first(num_seqs, size.num_tokens, size.num_tokens),
            block_tables=self._tables,
            num_decodes=0,
            max_query_len=1 if size.are_decodes else size.num_tokens,
            query_lens=(),
            context_lens_host=(),
            adapters=self._tables[:, -1] if has_adapters else None,
            are_shifted=False,
        )
