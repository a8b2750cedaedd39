"""Plans a GPU's memory before anything is loaded: weights, the largest step, KV.

The caller asks for step sizes that suit the device's speed; they are reduced if the memory next to
the weights is too small. On a CPU memory does not limit them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from disagg.config import CPU_MAX_NUM_BATCHED_TOKENS, CPU_MAX_NUM_SEQS, EngineConfig
from disagg.engine.device.kv_shape import KVShape, choose_num_blocks
from disagg.engine.device.workspace import captured_nbytes, running_nbytes, step_nbytes
from disagg.errors import NotEnoughMemory
from disagg.kernels.packed_sizes import Keeper, Kind
from disagg.models.adapter import padded_rank, slots_nbytes
from disagg.models.checkpoint import StoredTensor
from disagg.models.draft_layers import DraftLayers
from disagg.models.model_config import ModelConfig
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.share import Share

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


# Tokens of a draft model's step beside one for each sequence: those by which sequences are behind.
MISSING_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model as a device keeps it.

    Attributes:
        config: of the whole model, not a rank's part.
        shape: format of the rank's KV blocks.
        itemsize: bytes of a number with which the model computes.
        tensors: the tensors of a quantised checkpoint. Some of its matrices stay packed on a GPU,
            or, if the quantization is "packed", on a CPU.
        part: the layers that it is, if it drafts with weights or hidden states of another model.
    """

    config: ModelConfig
    shape: KVShape
    itemsize: int
    quantization: Kind | Literal["packed"] | None = None
    tensors: Mapping[str, StoredTensor] | None = None
    part: DraftLayers | None = None

    def weights_nbytes(self, share: Share, *, on_gpu: bool) -> int:
        """Bytes of a rank's weights in memory, without those of another model."""
        if self.part is not None:
            return self.part.own_nbytes(self.itemsize)
        quantization, kept = self.quantization, self.tensors if on_gpu else None
        if quantization == "packed":
            quantization, kept = None, self.tensors
        keeper: Keeper = "gpu" if on_gpu else "cpu"
        format = DeviceFormat(self.itemsize, keeper, kept, quantization)
        return weights_nbytes(self.config, format, share)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of steps, and the memory that they and the weights need.

    Attributes:
        max_num_seqs, max_num_batched_tokens: sequences and tokens of the largest step.
        weights_nbytes: bytes of the first rank's weights in memory.
        drafts_nbytes: bytes of its draft model's weights.
        workspace_nbytes: bytes that steps need on the device besides weights and KV.
        block_nbytes: bytes of a block's KV, and of as many tokens' KV of the draft model, and the
            hidden states from which it drafts.
    """

    shape: KVShape
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_nbytes: int
    drafts_nbytes: int
    workspace_nbytes: int
    block_nbytes: int

    @property
    def beside_nbytes(self) -> int:
        """Bytes that are needed beside KV."""
        return self.weights_nbytes + self.drafts_nbytes + self.workspace_nbytes

    def num_blocks(self, config: EngineConfig, room_nbytes: int | None) -> int:
        """See `choose_num_blocks`. room_nbytes: for KV of both models."""
        if room_nbytes is not None:
            room_nbytes = room_nbytes * self.shape.block_nbytes // self.block_nbytes
        sizes = self.max_model_len, room_nbytes, self.max_num_seqs
        return choose_num_blocks(config, self.shape, *sizes)

    def kv_nbytes(self, config: EngineConfig) -> int:
        """Bytes of the KV cache of a worker on a CPU."""
        return self.num_blocks(config, None) * self.block_nbytes

    def num_kv_tokens(self, config: EngineConfig, gpu_nbytes: int | None) -> int:
        """Tokens that the KV cache would hold. gpu_nbytes: memory of the GPU; None on a CPU."""
        room_nbytes = None
        if gpu_nbytes is not None:
            room_nbytes = int(config.gpu_memory_utilization * gpu_nbytes) - self.beside_nbytes
        num_rows = self.shape.groups.num_whole(self.num_blocks(config, room_nbytes))
        return num_rows * self.shape.block_size


def plan_memory(
    config: EngineConfig,
    stored: StoredModel,
    max_model_len: int,
    claim_nbytes: int | None,
    largest_step: tuple[int, int] = LARGEST_STEP,
    drafts: StoredModel | None = None,
) -> MemoryPlan:
    """Choose the sizes of steps.

    All ranks of a worker make the same choice, because each counts the weights of the first rank.
    That rank has the most if experts, or groups in them, cannot be divided evenly.

    Args:
        claim_nbytes: GPU memory that the worker may use; None on a CPU.
        largest_step: the sequences and tokens that a step on a GPU should have if there is room.
        drafts: its draft model.

    Raises:
        NotEnoughMemory: one sequence of full length does not fit.
    """
    shape, itemsize = stored.shape, stored.itemsize
    first = replace(shape.share, rank=0)
    model_nbytes = stored.weights_nbytes(first, on_gpu=claim_nbytes is not None)
    if config.enable_lora:
        of_adapters = config.max_loras, config.max_lora_rank, itemsize
        model_nbytes += slots_nbytes(stored.config, first, *of_adapters)
    drafts_nbytes, block_nbytes = 0, shape.block_nbytes
    if drafts is not None:
        drafts_nbytes = drafts.weights_nbytes(drafts.shape.share, on_gpu=claim_nbytes is not None)
        block_nbytes += math.ceil(drafts.shape.block_nbytes / shape.groups.num_blocks_of_row)
        if drafts.part is not None and drafts.part.is_head:  # a state of each token
            block_nbytes += shape.block_size * drafts.config.hidden_size * drafts.itemsize
    model = first.config(stored.config)
    num_seqs, num_tokens = CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS
    if claim_nbytes is not None:
        room_nbytes = claim_nbytes - model_nbytes - drafts_nbytes
        # Of a token; a recurrent state counts as that of a sequence of `TOKENS_PER_SEQ`.
        num_kv_groups = shape.groups.num_groups - shape.groups.num_states
        kv_nbytes = block_nbytes * num_kv_groups / shape.block_size
        kv_nbytes += block_nbytes * 2 * shape.groups.num_states / TOKENS_PER_SEQ
        num_seqs, num_tokens = _step_of_gpu(
            config, model, kv_nbytes, stored, room_nbytes, largest_step
        )
    # All sequences of a step may decode. If one of the two sizes is set, the other follows from it.
    num_seqs = config.max_num_seqs or min(num_seqs, config.max_num_batched_tokens or num_seqs)
    num_tokens = config.max_num_batched_tokens or max(num_tokens, num_seqs)
    num_graphs = 0  # of each size; with LoRA with and without adapters
    if claim_nbytes is not None and not config.enforce_eager:
        num_graphs = 1 + config.enable_lora
    workspace_nbytes = _steps_nbytes(stored, first, num_seqs, num_tokens, max_model_len, num_graphs)
    if config.enable_lora:  # sums of q, k and v in float32
        workspace_nbytes += 3 * 4 * padded_rank(config.max_lora_rank) * num_tokens
    if drafts is not None:
        sizes = num_seqs, num_seqs + MISSING_TOKENS, max_model_len
        workspace_nbytes += _steps_nbytes(drafts, drafts.shape.share, *sizes, num_graphs)
    sizes_of_step = max_model_len, num_seqs, num_tokens
    nbytes = model_nbytes, drafts_nbytes, workspace_nbytes, block_nbytes
    plan = MemoryPlan(shape, *sizes_of_step, *nbytes)
    if claim_nbytes is None:
        plan.num_blocks(config, None)
    else:
        _check_fits(config, plan, claim_nbytes)
    return plan


def _steps_nbytes(
    stored: StoredModel,
    share: Share,
    num_seqs: int,
    num_tokens: int,
    max_model_len: int,
    num_graphs: int,
) -> int:
    """Bytes that steps of up to so many sequences and tokens need. num_graphs: of each size."""
    model, itemsize, num_ranks = share.config(stored.config), stored.itemsize, share.num_ranks
    nbytes = step_nbytes(model, itemsize, num_seqs, num_tokens, num_ranks)
    groups = stored.shape.groups
    num_columns = groups.num_groups * groups.num_rows(max_model_len)
    nbytes += running_nbytes(model, num_seqs, max_model_len, num_columns)
    if not num_graphs:
        return nbytes
    from disagg.engine.device.step_graphs import graph_sizes  # needs Triton

    sizes = [size.num_tokens for size in graph_sizes(num_seqs)] * num_graphs
    keeps_layers = stored.tensors is not None and not (model.experts and model.experts.is_mxfp4)
    is_packed = keeps_layers or stored.quantization is not None
    captured = captured_nbytes(model, itemsize, sizes, num_ranks, is_packed=is_packed)
    return nbytes + captured


def _step_of_gpu(
    config: EngineConfig,
    model: ModelConfig,
    kv_nbytes: float,
    stored: StoredModel,
    room_nbytes: int,
    largest_step: tuple[int, int],
) -> tuple[int, int]:
    """Sequences and tokens of the largest step that fits into the memory besides the weights.

    kv_nbytes: of a token.
    """
    most_seqs, num_tokens = largest_step
    num_ranks, itemsize = stored.shape.share.num_ranks, stored.itemsize
    num_fitting = int(room_nbytes / (TOKENS_PER_SEQ * kv_nbytes)) // 32 * 32
    num_seqs = config.max_num_seqs or max(LEAST_NUM_SEQS, min(num_fitting, most_seqs))
    while num_tokens > LEAST_BATCHED_TOKENS and (
        MOST_OF_ROOM * step_nbytes(model, itemsize, num_seqs, num_tokens, num_ranks) > room_nbytes
    ):
        num_tokens //= 2
    return num_seqs, num_tokens


def _check_fits(config: EngineConfig, plan: MemoryPlan, claim_nbytes: int) -> None:
    block_nbytes = plan.block_nbytes
    num_blocks = plan.shape.groups.num_at_most(plan.max_model_len)
    if config.num_gpu_blocks_override is not None:
        num_blocks = max(num_blocks, config.num_gpu_blocks_override)
    if config.kv_cache_memory_bytes is not None:  # of the model itself
        num_blocks = max(num_blocks, config.kv_cache_memory_bytes // plan.shape.block_nbytes)
    kv_nbytes = num_blocks * block_nbytes
    if plan.beside_nbytes + kv_nbytes <= claim_nbytes:
        return
    num_room = max(0, claim_nbytes - plan.beside_nbytes) // block_nbytes
    num_fitting = plan.shape.groups.longest(num_room)
    if num_fitting > 0:
        advice = f"Lower max_model_len to {num_fitting} or less, or max_num_batched_tokens"
        flag = "max_model_len"
    else:
        advice = "Use a smaller model or a larger GPU, or lower max_num_batched_tokens"
        flag = "gpu_memory_utilization"
    drafts = f"{_gb(plan.drafts_nbytes)} of those of the draft model, "
    raise NotEnoughMemory(
        f"{_gb(plan.weights_nbytes)} of weights, {drafts if plan.drafts_nbytes else ''}"
        f"{_gb(plan.workspace_nbytes)} for steps of"
        f" {plan.max_num_seqs} sequences and {plan.max_num_batched_tokens} tokens, and"
        f" {_gb(kv_nbytes)} of KV ({plan.max_model_len} tokens of max_model_len, {num_blocks}"
        f" blocks) are {_gb(plan.beside_nbytes + kv_nbytes)}; a worker has {_gb(claim_nbytes)} of"
        f" its GPU (gpu_memory_utilization = {config.gpu_memory_utilization:g}). {advice}, or raise"
        " gpu_memory_utilization.",
        param=flag,
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
