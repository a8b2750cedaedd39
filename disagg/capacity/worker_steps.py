"""What the roofline tells a worker at its start: the prior of its time model, and its largest step.

The prior needs only the right order of magnitude, since the fit corrects it within some steps. With
one default for all, a small model on a CPU core and a large one on a GPU would differ by a factor
of 100.

The largest step is as small as nearly full speed allows. The sequences of a step share one reading
of the weights, and its prompt tokens share one launch of every kernel. Beyond some number this
gains little, but each token waits for its whole step: on an H100, 512 sequences have a 5 % higher
throughput than 256, but each token takes twice as long. Sizes are upper bounds, used if the memory
has room for them (`engine.device.memory_plan`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from disagg.capacity.efficiency import ON_CPU
from disagg.capacity.gpus import CPU_CORE, GPUS, gpu_called
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import KV_BITS, ModelShape, shape_of
from disagg.capacity.sizing import FleetPlan
from disagg.config import CPU_MAX_NUM_BATCHED_TOKENS, CPU_MAX_NUM_SEQS, EngineConfig
from disagg.models.description import ModelDescription
from disagg.time_model import StepTimeModel

UNKNOWN_GPU = "a100-80gb"  # in the middle of the table
NUMS_SEQS = range(256, 513, 32)
NUMS_TOKENS = (2048, 4096, 8192)
CONTEXT_TOKENS = 512  # of a sequence; longer ones need fewer sequences for the same share
# Shares of the throughput of the largest step. For decodes, the last 5 % would double the time of
# every step; larger prompt chunks only delay streams that wait for a step with prompts.
DECODE_SHARE = 0.95
PROMPT_SHARE = 0.995


def step_times(
    shape: ModelShape, device_name: str, num_ranks: int = 1, *, expert_parallel: bool = False
) -> tuple[StepTimeModel, str]:
    """A prior for the time model of a worker, and the name of the device whose roofline it is.

    Args:
        device_name: name of the GPU from its driver; empty on a CPU.
        num_ranks: number of devices of the worker.
        expert_parallel: whether each device has whole experts.
    """
    ranks: dict[str, Any] = {"num_gpus": num_ranks, "expert_parallel": expert_parallel}
    if not device_name:
        placement = Placement(replace(shape, is_widened=True), CPU_CORE, efficiency=ON_CPU, **ranks)
        return placement.time_model(), "one CPU core" if num_ranks == 1 else "CPU cores"
    gpu = gpu_called(device_name)
    placement = Placement(shape, gpu or GPUS[UNKNOWN_GPU], **ranks)
    known = gpu.name if gpu else f"{UNKNOWN_GPU}, because {device_name!r} is not known"
    return placement.time_model(), known


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
    """The most sequences and tokens that one step should have.

    Args:
        device_name: name of the GPU from its driver. If the planner does not know the GPU, and so
            its speed, steps may have the largest size.
        num_ranks: number of devices of the worker.
        expert_parallel: whether each device has whole experts.
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


def step_sizes_of(fleet: FleetPlan) -> tuple[int, int]:
    """Sequences and tokens of the largest step of workers on these GPUs.

    Both pools have the same settings: those of the slower GPU.
    """
    every = [_step_sizes(pool.placement) for pool in fleet.pools]
    return min(num_seqs for num_seqs, _ in every), min(num_tokens for _, num_tokens in every)


def _step_sizes(worker: Placement) -> tuple[int, int]:
    if worker.gpu is CPU_CORE:
        return CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS
    return step_sizes(
        worker.shape,
        worker.gpu.name,
        worker.kv,
        worker.num_gpus,
        expert_parallel=worker.expert_parallel,
    )
