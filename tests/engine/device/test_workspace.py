"""Memory that is kept from KV, against what is really allocated where that can be counted here.

That a step's tensors fit is for a GPU to show; `interpreted_graphs` counts those of graphs.
"""

from __future__ import annotations

import dataclasses

import torch

from disagg.config import EngineConfig
from disagg.engine.device.decode_graphs import capture_sizes
from disagg.engine.device.kv_cache import KVShape
from disagg.engine.device.memory_plan import plan_memory
from disagg.engine.device.mixed_graphs import graph_sizes
from disagg.engine.device.workspace import captured_nbytes
from disagg.kernels.kv_pages import FORMATS
from tests.models.paging import SMALL

LLAMA_3_8B = dataclasses.replace(
    SMALL,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    sliding_windows=(None,) * 32,
)


def test_logits_of_graphs_are_counted_once_and_not_for_each_graph() -> None:
    small, large = (
        captured_nbytes(dataclasses.replace(LLAMA_3_8B, vocab_size=n), 2, capture_sizes(1024), 128)
        for n in (1, 128257)
    )
    assert large - small == 1024 * 128256 * (4 + 2)


def test_what_is_captured_is_kept_from_kv_unless_nothing_is() -> None:
    shape = KVShape.of(LLAMA_3_8B, "weights", 64, FORMATS["bfloat16"])

    def workspace(claim_nbytes: int | None, **changes: object) -> int:
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
        config = EngineConfig(**sizes, **changes)  # type: ignore[arg-type]
        plan = plan_memory(config, LLAMA_3_8B, shape, 2048, torch.bfloat16, claim_nbytes)
        return plan.workspace_nbytes

    claim_nbytes = 72 * 10**9
    eager = workspace(claim_nbytes, enforce_eager=True)
    captured = workspace(claim_nbytes) - eager
    assert captured == captured_nbytes(LLAMA_3_8B, 2, graph_sizes(256, False), 2048 // 64)
    assert workspace(None) == eager
