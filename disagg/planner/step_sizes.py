"""How large steps should be on a GPU, by the roofline: as small as nearly full speed allows.

The sequences of a step share one reading of the weights, and its prompt tokens one launch of every
kernel. Beyond some number both gain little, and each token waits for its whole step: 512 sequences
decode 5 % faster than 256 do on an H100, and take twice as long for each token of every answer.

These are upper bounds, used if the memory has room for them (`engine.device.memory_plan`).
"""

from __future__ import annotations

from disagg.config import EngineConfig
from disagg.models.description import ModelDescription
from disagg.planner.gpus import gpu_called
from disagg.planner.roofline import Placement
from disagg.planner.shapes import KV_BITS, ModelShape, shape_of

NUMS_SEQS = range(256, 513, 32)
NUMS_TOKENS = (2048, 4096, 8192)
CONTEXT_TOKENS = 512  # of a sequence. Longer ones need fewer sequences for the same share.
# Of the throughput of the largest step. The first one doubles the time of every step for 5 %; the
# second delays only those who wait for a step with prompts.
DECODE_SHARE = 0.95
PROMPT_SHARE = 0.995


def largest_step(engine: EngineConfig, model: ModelDescription, gpu_name: str) -> tuple[int, int]:
    """Sequences and tokens that a worker's largest step should have; see `step_sizes`."""
    return step_sizes(
        shape_of(model),
        gpu_name,
        engine.kv_cache_dtype,
        engine.tensor_parallel_size,
        expert_parallel=engine.enable_expert_parallel,
    )


def step_sizes(
    shape: ModelShape,
    device_name: str,
    kv_cache_dtype: str = "auto",
    num_ranks: int = 1,
    *,
    expert_parallel: bool = False,
) -> tuple[int, int]:
    """Sequences and tokens that one step should have at most.

    Args:
        device_name: as the GPU's driver says it. Nothing is known of the speed of one that is not
            in the planner's table, so its steps may be as large as any.
        num_ranks: devices of the worker.
        expert_parallel: each has whole experts.
    """
    gpu = gpu_called(device_name)
    if gpu is None:
        return NUMS_SEQS[-1], NUMS_TOKENS[-1]
    kv = kv_cache_dtype if kv_cache_dtype in KV_BITS else "bf16"
    placement = Placement(shape, gpu, num_ranks, kv=kv, expert_parallel=expert_parallel)

    def decoded_per_s(num_seqs: int) -> float:
        return num_seqs / placement.decode_step_s(num_seqs, CONTEXT_TOKENS)

    def prompt_s(num_tokens: int) -> float:
        return placement.prefill_s(NUMS_TOKENS[-1], num_tokens)

    least_per_s = DECODE_SHARE * decoded_per_s(NUMS_SEQS[-1])
    most_s = prompt_s(NUMS_TOKENS[-1]) / PROMPT_SHARE
    return (
        next(n for n in NUMS_SEQS if decoded_per_s(n) >= least_per_s),
        next(n for n in NUMS_TOKENS if prompt_s(n) <= most_s),
    )
