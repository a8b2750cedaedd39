"""Raises the errors of `build.build_engine` before anything is loaded, and plans the memory.

Loads no torch on a machine without a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import msgspec

from disagg.config import EngineConfig, model_path
from disagg.engine.device.choices import (
    DeviceType,
    check_quantization,
    choose_device,
    choose_dtype,
)
from disagg.engine.device.kv_shape import KVShape, choose_format
from disagg.engine.device.memory_plan import (
    LARGEST_STEP,
    MemoryPlan,
    StoredModel,
    plan_memory,
)
from disagg.errors import StartupError
from disagg.kernels.kv_pages import FORMATS
from disagg.kernels.packed_sizes import INT4_GROUP
from disagg.kv_groups import group_layers
from disagg.models.description import ModelDescription, describe_model
from disagg.models.draft_layers import (
    DraftLayers,
    eagle3_head,
    first_layers,
    medusa_heads,
    mtp_layer,
)
from disagg.models.model_config import ModelConfig
from disagg.models.parts import check_weights, layer_parts
from disagg.models.share import WHOLE, Share, check_ranks

_HEADS = {"eagle3": eagle3_head, "medusa": medusa_heads}  # that have checkpoints of their own
CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64  # long runs for copies; a tile of the attention kernel


def check_engine(
    config: EngineConfig,
    description: ModelDescription,
    *,
    gpu_nbytes: int | None = None,
    is_here: bool = True,
    largest_step: tuple[int, int] = LARGEST_STEP,
) -> MemoryPlan | None:
    """Raise the errors that `build_engine` would raise, as far as the headers of the weights show.

    Returns how the engine would divide the memory; None if the device's memory is not known.

    Args:
        gpu_nbytes: memory of the engine's GPU; None: not known.
        is_here: whether the engine would run on this machine. If not, no GPU's memory is checked.
        largest_step: see `plan_memory`.

    Raises:
        ModelError, NotEnoughMemory, StartupError: as `build_engine`.
    """
    model = description.config
    check_ranks_of(config, model)
    check_states(config, model)
    choose_max_model_len(config, model)
    check_weights(description)
    if not is_here and config.device != "cpu":
        draft_model_of(config, description)
        return None
    chosen = choose(config, description, config.share())
    if chosen.device == "cpu":
        return chosen.plan_memory(None, largest_step)
    if gpu_nbytes is None:
        return None
    is_sized = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
    claim_nbytes = int(gpu_nbytes * (1.0 if is_sized else config.gpu_memory_utilization))
    return chosen.plan_memory(claim_nbytes, largest_step)


def draft_model_of(
    config: EngineConfig, model: ModelDescription
) -> ModelDescription | DraftLayers | None:
    """The draft model that a configuration names, or the layers that draft.

    Raises:
        ModelError, StartupError: it is missing or damaged, or cannot draft for the model.
    """
    asked = config.speculative_config
    if asked is None or asked.method == "ngram":
        return None
    if config.tensor_parallel_size > 1:
        raise StartupError(
            f"The method {asked.method} needs tensor_parallel_size = 1: it runs on one device."
            " Leave speculative_config out, or use its method ngram.",
            param="speculative_config",
        )
    if model.config.altup is not None and asked.method != "draft_model":
        raise StartupError(
            f"The method {asked.method} is not possible for {model.name}: a head has one hidden"
            " state of a token, and this model several. Use the method ngram or draft_model.",
            param="speculative_config",
        )
    if asked.exit_layer is not None:
        return first_layers(model, asked.exit_layer)
    if asked.model is None:
        return mtp_layer(model)
    path = model_path(asked.model, asked.revision)
    if asked.method in _HEADS:
        return _HEADS[asked.method](path, model)
    drafts = describe_model(path)
    if drafts.config.states is not None:
        raise StartupError(
            f"{drafts.name} cannot draft: its layers with linear attention have a recurrent state,"
            " from which a wrong draft cannot be taken back. Choose another draft model.",
            param="speculative_config",
        )
    if _words(model) != _words(drafts):
        raise StartupError(
            f"{drafts.name} cannot draft for {model.name}: their tokenizers differ, so its token"
            " ids mean other text. Choose a draft model of the same family.",
            param="speculative_config",
        )
    check_weights(drafts)
    return drafts


def _draft_config(
    config: EngineConfig, shape: KVShape, dtype: str, drafts: ModelDescription | DraftLayers
) -> EngineConfig:
    """The configuration of a draft model's engine.

    Args:
        shape, dtype: the KV format and the dtype of the model that it drafts for.
    """
    is_part = isinstance(drafts, DraftLayers)
    asked, most = config.speculative_config, drafts.config.max_model_len
    assert asked is not None
    return msgspec.structs.replace(
        config,
        quantization=asked.quantization,
        kv_cache_dtype="auto",
        speculative_config=None,
        enable_lora=False,
        dtype=dtype if is_part else config.dtype,
        # A head's step has a few kernels, and each has other states as its input.
        enforce_eager=config.enforce_eager or (isinstance(drafts, DraftLayers) and drafts.is_head),
        block_size=shape.block_size,
        max_model_len=min(most, config.max_model_len or most),
    )


def _words(description: ModelDescription) -> tuple[object, list[tuple[object, object]]]:
    """The token ids of a model's tokenizer, by text."""
    tokenizer = json.loads(description.read_tokenizer())
    added = tokenizer.get("added_tokens") or ()
    return tokenizer["model"]["vocab"], [(each["id"], each["content"]) for each in added]


class Choices(NamedTuple):
    """The settings of an engine, with all defaults filled in for its model and device.

    shape: the format of the rank's KV blocks.
    drafts: those of its draft model, if it has one.
    """

    config: EngineConfig
    model: ModelDescription | DraftLayers
    device: DeviceType
    dtype: str
    shape: KVShape
    max_model_len: int
    drafts: Choices | None

    @property
    def stored(self) -> StoredModel:
        """How the model and its KV are kept in memory."""
        itemsize, quantization = FORMATS[self.dtype].itemsize, self.config.quantization
        if isinstance(self.model, DraftLayers):
            return StoredModel(self.model.config, self.shape, itemsize, part=self.model)
        stays_packed = self.model.config.quantized is not None
        stays_packed |= self.config.quantization == "packed"
        tensors = self.model.tensors if stays_packed else None
        return StoredModel(self.model.config, self.shape, itemsize, quantization, tensors)

    def plan_memory(self, claim_nbytes: int | None, largest_step: tuple[int, int]) -> MemoryPlan:
        """See `memory_plan.plan_memory`."""
        drafts = None if self.drafts is None else self.drafts.stored
        sizes = self.max_model_len, claim_nbytes, largest_step
        return plan_memory(self.config, self.stored, *sizes, drafts)


def choose(
    config: EngineConfig,
    description: ModelDescription | DraftLayers,
    share: Share,
    *,
    in_groups: bool = True,
) -> Choices:
    """Fill in the defaults of a configuration.

    Args:
        in_groups: whether groups of layers have blocks of their own (`disagg.kv_groups`); otherwise
            all layers share blocks, and keep them for all tokens.

    Raises:
        StartupError: a setting contradicts the model or the device.
    """
    model = description.config
    check_ranks_of(config, model)
    max_model_len = choose_max_model_len(config, model)
    if isinstance(description, ModelDescription):
        description = description.within(max_model_len)
        model = description.config
    check_states(config, model)
    device = choose_device(config)
    check_quantization(config, model, device, is_quantized=description.is_quantized)
    dtype = choose_dtype(config, model, device)
    shape = _choose_shape(config, description, dtype, device, share, in_groups=in_groups)
    drafts = model_of_drafts = None
    if isinstance(description, ModelDescription):
        model_of_drafts = draft_model_of(config, description)
    if model_of_drafts is not None:
        of_drafts = _draft_config(config, shape, dtype, model_of_drafts)
        drafts = choose(of_drafts, model_of_drafts, share, in_groups=False)
    return Choices(config, description, device, dtype, shape, max_model_len, drafts)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The length of the longest sequence: as configured, or else the model's limit.

    Raises:
        StartupError: the configured length is above the model's limit.
    """
    configured = config.max_model_len
    if configured is not None and configured > model.max_model_len:
        raise StartupError(
            f"max_model_len is {configured}, but the model has {model.max_model_len} positions at"
            " most; lower it, or leave it out.",
            param="max_model_len",
        )
    return configured or model.max_model_len


def check_ranks_of(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `StartupError` if the model cannot be split among the configured number of ranks."""
    share = config.share()
    check_ranks(model, share.num_ranks, expert_parallel=share.has_whole_experts)
    cut = _cut_columns(model, share) if config.quantization == "int4" else 0
    if cut:
        whole, experts = replace(share, has_whole_experts=True), model.experts
        also = ""
        if experts and not experts.is_mxfp4 and not _cut_columns(model, whole):
            also = ", or set enable_expert_parallel, which splits no expert"
        raise StartupError(
            f"quantization = 'int4' is not possible with tensor_parallel_size = {share.num_ranks}:"
            f" {INT4_GROUP} neighbouring columns share a scale, and a rank would have {cut} columns"
            f" of some matrices, which is no multiple of {INT4_GROUP}. Set quantization = 'int8',"
            f" or change tensor_parallel_size{also}.",
            param="quantization",
        )


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `StartupError` for a setting that is not supported with recurrent states."""
    if model.states is None:
        return
    is_asked = {
        "speculative_config": config.speculative_config is not None,
        "enable_lora": config.enable_lora,
    }
    for param, is_set in is_asked.items():
        if is_set:
            raise StartupError(
                f"{param} is not supported for {model.family}, whose layers with linear attention"
                " have a recurrent state; leave it out.",
                param=param,
            )


def _cut_columns(model: ModelConfig, share: Share) -> int:
    """The number of a rank's columns in a matrix whose int4 groups it would cut; 0: none is cut."""
    for layer in range(model.num_layers):
        fields, whole = (layer_parts(model, layer, each) for each in (share, WHOLE))
        for field in ("output", "down", "shared_down"):
            for part in fields.get(field, ()):
                num_columns = part.shape[1]
                if num_columns % INT4_GROUP and num_columns != whole[field][0].shape[1]:
                    return num_columns
    return 0


def _choose_shape(
    config: EngineConfig,
    model: ModelDescription | DraftLayers,
    dtype: str,
    device: DeviceType,
    share: Share,
    *,
    in_groups: bool,
) -> KVShape:
    """The format of a rank's KV blocks. Raises `StartupError` if the device does not support it."""
    is_latent = model.config.latent is not None
    format = choose_format(config, dtype, device, is_latent=is_latent)
    block_size = config.block_size or (GPU_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE)
    fingerprint = model.fingerprint
    if config.quantization is not None:
        # Quantised weights compute other KV than the original ones, and GPUs round differently.
        fingerprint += f"+{config.quantization}" + ("-gpu" if device == "cuda" else "")
    # Where layers have states, `KVShape` knows how many blocks a state needs.
    in_groups &= model.config.states is None
    windows, sources = model.config.sliding_windows, model.config.kv_sources
    layers = group_layers(windows, sources) if in_groups else None
    return KVShape.from_model(model.config, fingerprint, block_size, format, share, layers)
