"""Building an engine: decide its device, dtype and memory, load the model, make the parts.

Knows devices, dtypes and weights. `check.check_engine` raises the same errors without loading
anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence
from functools import partial

import torch

from disagg.config import EngineConfig
from disagg.engine.device.check import choose_max_model_len, choose_shape
from disagg.engine.device.choices import check_quantization, choose_device, choose_dtype
from disagg.engine.device.gpu import GpuMemory, check_gpu
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import choose_num_blocks
from disagg.engine.device.memory_plan import LARGEST_STEP, plan_memory
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.scheduler import Scheduler
from disagg.kernels.kv_pages import FORMATS
from disagg.messages import StartStep
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription
from disagg.models.weights import Progress

CPU_WARM_UP_TOKENS = 64  # picks kernels and touches memory; more would only delay the start

NewGenerations = Callable[[int], MutableSequence[int]]
Tell = Callable[[StartStep], None]
LoadModel = Callable[[ModelDescription, torch.dtype, torch.device, Progress], Decoder]


def _own_generations(num_blocks: int) -> MutableSequence[int]:
    """A stamp table that no other process reads."""
    return array("Q", bytes(8 * num_blocks))


def build_engine(
    config: EngineConfig,
    description: ModelDescription,
    progress: Tell = lambda step: None,
    new_generations: NewGenerations = _own_generations,
    load: LoadModel | None = None,
    largest_step: tuple[int, int] = LARGEST_STEP,
) -> tuple[Engine, KVCache]:
    """Load a model, size and allocate its cache, and return an engine that is ready to step.

    Args:
        progress: called after every tensor and before every longer part of the work.
        new_generations: makes the stamp table for a number of blocks (a transport's, which remote
            readers see); by default one of the engine's own.
        load: makes the decoder; by default of the checkpoint's weights, quantised if asked for.
        largest_step: see `plan_memory`.

    Raises:
        ModelError: the checkpoint is missing, damaged or unsupported.
        NotEnoughMemory: one sequence of full length does not fit.
        StartupError: a setting contradicts the model or the machine.
    """
    model = description.config
    max_model_len = choose_max_model_len(config, model)
    device_type = choose_device(config)
    check_quantization(config, model, device_type)
    device = torch.device(device_type)
    gpu = GpuMemory(config, device) if device_type == "cuda" else None
    dtype_name = choose_dtype(config, model, device_type)
    shape = choose_shape(config, description, dtype_name, device_type)
    dtype = FORMATS[dtype_name].dtype
    if gpu is not None:
        check_gpu(device, model, dtype)
    claim_nbytes = None if gpu is None else gpu.claim_nbytes
    memory = plan_memory(
        config, model, shape, max_model_len, dtype.itemsize, claim_nbytes, largest_step
    )
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    load = load or partial(load_model, quantization=config.quantization)
    decoder = load(
        description, dtype, device, lambda *nbytes: progress(StartStep("weights", *nbytes))
    )
    room_nbytes = None if gpu is None else gpu.left_nbytes() - memory.workspace_nbytes
    num_blocks = choose_num_blocks(config, shape, max_model_len, room_nbytes, memory.max_num_seqs)
    sizes = memory.max_num_seqs, memory.max_num_batched_tokens
    progress(StartStep("kv_blocks", 0, num_blocks, *sizes))
    kv_cache = KVCache(shape, num_blocks, device)
    grammars = Grammars(description.read_tokenizer, description.eos_token_ids)
    runner = ModelRunner(decoder, kv_cache, grammars, memory.max_num_seqs)
    progress(StartStep("warm_up"))
    is_cpu = device_type == "cpu"
    num_tokens = min(memory.max_num_batched_tokens, max_model_len - 1)
    runner.warm_up(
        min(num_tokens, CPU_WARM_UP_TOKENS) if is_cpu else num_tokens, memory.max_num_seqs
    )
    if is_cpu:
        runner.measure_threads(max_model_len)
    elif not config.enforce_eager:
        with_drafts = config.speculative_config is not None
        runner.capture(memory.max_num_seqs, max_model_len, with_drafts=with_drafts)
    scheduler = Scheduler(
        BlockPool(num_blocks, shape.block_size, new_generations(num_blocks)),
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        enable_prefix_caching=config.enable_prefix_caching,
        prompt_lookup=_prompt_lookup(config),
    )
    # No async scheduling on a CPU: the same threads plan and compute.
    launcher = None if is_cpu else runner
    return Engine(scheduler, runner, grammars=grammars, launcher=launcher), kv_cache


def _prompt_lookup(config: EngineConfig) -> PromptLookup | None:
    asked = config.speculative_config
    if asked is None:
        return None
    return PromptLookup(asked.num_speculative_tokens, asked.prompt_lookup_max)
