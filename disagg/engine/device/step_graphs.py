"""Captures the steps of a decoder as CUDA graphs: decodes, short prompts, drafts.

Every rank of a worker captures the same graphs in the same order, because capturing computes each
step once, and its sums over ranks wait for all ranks. These sums are part of the graphs, so a step
is one launch on each rank, too.
"""

from __future__ import annotations

from typing import TypeAlias

from disagg.engine.device.batching import Batching
from disagg.engine.device.decode_graphs import (
    DecodeGraphs,
    Record,
    new_logits,
    record_cuda_graph,
)
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.mixed_graphs import MixedGraphs, mixed_sizes
from disagg.models.decoder import Decoder

StepGraphs: TypeAlias = tuple[DecodeGraphs | MixedGraphs, ...]


def capture_steps(
    decoder: Decoder,
    kv_cache: KVCache,
    batching: Batching,
    max_num_seqs: int,
    max_model_len: int,
    with_drafts: bool,
    record: Record | None = None,
) -> StepGraphs:
    """Capture the graphs of all small steps.

    Args:
        batching: a GPU's batching, with room for `max_num_seqs` sequences.
        record: captures a graph; by default on the current GPU.
    """
    record = record or record_cuda_graph()
    max_num_blocks = -(-max_model_len // kv_cache.block_size)
    sizes = mixed_sizes(max_num_seqs, with_drafts)
    logits = new_logits(decoder, max(max_num_seqs, *(each.num_logits for each in sizes)))
    inputs, pages = batching.decode_inputs, kv_cache.pages
    assert inputs is not None, "only a GPU captures"
    return (
        DecodeGraphs(decoder, pages, max_num_seqs, inputs, record, logits),
        MixedGraphs(decoder, pages, sizes, max_num_seqs, max_num_blocks, record, logits),
    )
