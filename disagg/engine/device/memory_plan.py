"""Plans a GPU's memory before anything is loaded: weights, the largest step, KV.

The caller asks for step sizes that suit the device's speed; they are reduced if the memory next to
the weights is too small. On a CPU memory does not limit them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from disagg.config import CPU_MAX_NUM_BATCHED_TOKENS, CPU_MAX_NUM_SEQS, EngineConfig
from disagg.engine.device.kv_shape import KVShape, choose_num_blocks
from disagg.engine.device.workspace import captured_nbytes, running_nbytes, step_nbytes
from disagg.errors import NotEnoughMemory
from disagg.models.adapter import padded_rank, slots_nbytes
from disagg.models.checkpoint import StoredTensor
from disagg.models.model_config import ModelConfig
from disagg.models.packing import DeviceFormat, weights_nbytes

# Sequences and tokens of the largest step on a GPU whose speed is not known.
LARGEST_STEP = 512, 8192
# On a GPU every step reads all weights, so it should have many sequences: as many as find room for
# this number of tokens each ...
TOKENS_PER_SEQ = 512
LEAST_NUM_SEQS = 64
# ... and prompts need some thousand tokens in a step for full speed, if the step takes at most this
# share of the memory that the weights leave.
LEAST_BATCHED_TOKENS = 2048
MOST_OF_ROOM = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of steps, and the memory that they and the weights need.

    Attributes:
        max_num_seqs, max_num_batched_tokens: sequences and tokens of the largest step.
        weights_nbytes: bytes of the first rank's weights in memory.
        workspace_nbytes: bytes that steps need on the device besides weights and KV.
    """

    shape: KVShape
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_nbytes: int
    workspace_nbytes: int

    def kv_nbytes(self, config: EngineConfig) -> int:
        """Bytes of the KV cache of a worker on a CPU."""
        num_blocks = self.num_kv_tokens(config, None) // self.shape.block_size
        return num_blocks * self.shape.block_nbytes

    def num_kv_tokens(self, config: EngineConfig, gpu_nbytes: int | None) -> int:
        """Tokens that the KV cache would hold. gpu_nbytes: memory of the GPU; None on a CPU."""
        room_nbytes = None
        if gpu_nbytes is not None:
            claim_nbytes = int(config.gpu_memory_utilization * gpu_nbytes)
            room_nbytes = claim_nbytes - self.weights_nbytes - self.workspace_nbytes
        num_blocks = choose_num_blocks(
            config, self.shape, self.max_model_len, room_nbytes, self.max_num_seqs
        )
        return num_blocks * self.shape.block_size


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    shape: KVShape,
    max_model_len: int,
    itemsize: int,
    claim_nbytes: int | None,
    largest_step: tuple[int, int] = LARGEST_STEP,
    tensors: Mapping[str, StoredTensor] | None = None,
) -> MemoryPlan:
    """Choose the sizes of steps.

    All ranks of a worker make the same choice, because each counts the weights of the first rank.
    That rank has the most if experts, or groups in them, cannot be divided evenly.

    Args:
        model: the whole model, not a rank's part.
        shape: format of the rank's blocks.
        itemsize: bytes of a number with which the model computes.
        claim_nbytes: GPU memory that the worker may use; None on a CPU.
        largest_step: the sequences and tokens that a step on a GPU should have if there is room.
        tensors: the tensors of a quantised checkpoint. Some of its matrices stay packed on a GPU,
            or, if the quantization is "packed", on a CPU.

    Raises:
        NotEnoughMemory: one sequence of full length does not fit.
    """
    first = replace(shape.share, rank=0)
    keeps = claim_nbytes is not None or config.quantization == "packed"
    format = DeviceFormat(
        itemsize,
        "cpu" if claim_nbytes is None else "gpu",
        tensors if keeps else None,
        None if config.quantization == "packed" else config.quantization,
    )
    model_nbytes = weights_nbytes(model, format, first)
    if config.enable_lora:
        of_adapters = config.max_loras, config.max_lora_rank, itemsize
        model_nbytes += slots_nbytes(model, first, *of_adapters)
    model = first.config(model)
    num_seqs, num_tokens = CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS
    if claim_nbytes is not None:
        num_seqs, num_tokens = _step_of_gpu(
            config, model, shape, itemsize, claim_nbytes - model_nbytes, largest_step
        )
    # All sequences of a step may decode. If one of the two sizes is set, the other follows from it.
    num_seqs = config.max_num_seqs or min(num_seqs, config.max_num_batched_tokens or num_seqs)
    num_tokens = config.max_num_batched_tokens or max(num_tokens, num_seqs)
    workspace_nbytes = step_nbytes(model, itemsize, num_seqs, num_tokens, first.num_ranks)
    workspace_nbytes += running_nbytes(model, num_seqs, max_model_len)
    if config.enable_lora:  # sums of q, k and v in float32
        workspace_nbytes += 3 * 4 * padded_rank(config.max_lora_rank) * num_tokens
    if claim_nbytes is not None and not config.enforce_eager:
        from disagg.engine.device.step_graphs import graph_sizes  # needs Triton

        num_blocks = -(-max_model_len // shape.block_size)
        sizes = [size.num_tokens for size in graph_sizes(num_seqs)]
        sizes *= 1 + config.enable_lora  # with and without adapters
        keeps_layers = tensors is not None and not (model.experts and model.experts.is_mxfp4)
        is_packed = keeps_layers or config.quantization is not None
        workspace_nbytes += captured_nbytes(
            model, itemsize, sizes, num_blocks, first.num_ranks, is_packed=is_packed
        )
    plan = MemoryPlan(shape, max_model_len, num_seqs, num_tokens, model_nbytes, workspace_nbytes)
    if claim_nbytes is None:
        choose_num_blocks(config, shape, max_model_len, None, num_seqs)
    else:
        _check_fits(config, plan, claim_nbytes)
    return plan


def _step_of_gpu(
    config: EngineConfig,
    model: ModelConfig,
    shape: KVShape,
    itemsize: int,
    room_nbytes: int,
    largest_step: tuple[int, int],
) -> tuple[int, int]:
    """Sequences and tokens of the largest step that fits into the memory besides the weights."""
    most_seqs, num_tokens = largest_step
    num_ranks = shape.share.num_ranks
    seq_nbytes = TOKENS_PER_SEQ * shape.block_nbytes // shape.block_size
    num_fitting = room_nbytes // seq_nbytes // 32 * 32
    num_seqs = config.max_num_seqs or max(LEAST_NUM_SEQS, min(num_fitting, most_seqs))
    while num_tokens > LEAST_BATCHED_TOKENS and (
        MOST_OF_ROOM * step_nbytes(model, itemsize, num_seqs, num_tokens, num_ranks) > room_nbytes
    ):
        num_tokens //= 2
    return num_seqs, num_tokens


def _check_fits(config: EngineConfig, plan: MemoryPlan, claim_nbytes: int) -> None:
    shape, weights_nbytes = plan.shape, plan.weights_nbytes
    num_blocks = -(-plan.max_model_len // shape.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = max(num_blocks, config.num_gpu_blocks_override)
    kv_nbytes = max(num_blocks * shape.block_nbytes, config.kv_cache_memory_bytes or 0)
    beside_nbytes = weights_nbytes + plan.workspace_nbytes
    if beside_nbytes + kv_nbytes <= claim_nbytes:
        return
    num_fitting = (claim_nbytes - beside_nbytes) // shape.block_nbytes * shape.block_size
    if num_fitting > 0:
        advice = f"Lower max_model_len to {num_fitting} or less, or max_num_batched_tokens"
        flag = "max_model_len"
    else:
        advice = "Use a smaller model or a larger GPU, or lower max_num_batched_tokens"
        flag = "gpu_memory_utilization"
    raise NotEnoughMemory(
        f"{_gb(weights_nbytes)} of weights, {_gb(plan.workspace_nbytes)} for steps of"
        f" {plan.max_num_seqs} sequences and {plan.max_num_batched_tokens} tokens, and"
        f" {_gb(kv_nbytes)} of KV ({plan.max_model_len} tokens of max_model_len, {num_blocks}"
        f" blocks) are {_gb(beside_nbytes + kv_nbytes)}; a worker has {_gb(claim_nbytes)} of its"
        f" GPU (gpu_memory_utilization = {config.gpu_memory_utilization:g}). {advice}, or raise"
        " gpu_memory_utilization.",
        param=flag,
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
