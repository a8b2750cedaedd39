"""Builds an engine: decides its device, dtype and memory, loads the model, makes the parts.

Knows devices, dtypes and weights. `check.check_engine` raises the same errors without loading
anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence
from functools import partial

import torch

from disagg.config import EngineConfig
from disagg.engine.device.adapters import AdapterMemory, DeviceAdapters
from disagg.engine.device.check import Choices
from disagg.engine.device.deferral import Deferral
from disagg.engine.device.draft_model import DraftModel
from disagg.engine.device.engine_plan import EnginePlan
from disagg.engine.device.followers import Followers
from disagg.engine.device.gpu import new_stream, take_stream
from disagg.engine.device.head_drafts import HeadDrafts, HeadRunner
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.medusa_drafts import MedusaDrafts
from disagg.engine.device.memory_plan import LARGEST_STEP, MISSING_TOKENS
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.drafting import Proposer
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.scheduler import Scheduler
from disagg.kernels.kv_pages import FORMATS
from disagg.messages import StartStep
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription
from disagg.models.draft_layers import DraftLayers
from disagg.models.heads import HeadDecoder, MedusaHeads, first_layers_of
from disagg.models.weights import Progress

CPU_WARM_UP_TOKENS = 64  # enough to pick kernels and touch memory; more would delay the start

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
    followers: Followers | None = None,
) -> tuple[Engine, KVCache]:
    """Load a model, size and allocate its cache, and return an engine that is ready to step.

    Args:
        progress: called after every tensor and before every longer part of the work.
        new_generations: makes the stamp table for a number of blocks. A transport passes its own,
            which remote readers see; by default no other process reads the table.
        load: makes the decoder; by default from the checkpoint's weights, quantised if the
            configuration says so.
        largest_step: see `plan_memory`.
        followers: the other ranks, if `tensor_parallel_size` is above 1.

    Raises:
        ModelError: the checkpoint is missing, damaged or unsupported.
        NotEnoughMemory: one sequence of full length does not fit.
        StartupError: a setting contradicts the model or the machine.
    """
    share = config.share()
    plan = EnginePlan(config, description, share, largest_step)
    chosen, device, memory = plan.chosen, plan.device, plan.memory
    assert isinstance(chosen.model, ModelDescription)
    description = chosen.model
    begin_thread = take_stream(device)
    ranks = None if followers is None else followers.meet(device.type)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    load = load or partial(load_model, quantization=config.quantization, communicator=ranks)
    dtype = FORMATS[chosen.dtype].dtype
    try:
        decoder = load(
            description, dtype, device, lambda *nbytes: progress(StartStep("weights", *nbytes))
        )
    except RuntimeError:  # a communicator raises it if another rank is gone
        if followers is not None:
            followers.raise_lost()
        raise
    memory_of_adapters = None
    if config.enable_lora:
        memory_of_adapters = AdapterMemory(decoder, description, share, config)
    draft_decoder = None if chosen.drafts is None else _draft_decoder(chosen.drafts, decoder)
    room_nbytes = plan.room_nbytes()
    if followers is not None:
        room_nbytes = followers.least_room_nbytes(room_nbytes)
    num_blocks = memory.num_blocks(config, room_nbytes)
    sizes = memory.max_num_seqs, memory.max_num_batched_tokens
    progress(StartStep("kv_blocks", 0, num_blocks, *sizes))
    kv_cache = KVCache(chosen.shape, num_blocks, device)
    if isinstance(draft_decoder, HeadDecoder | MedusaHeads):
        draft_decoder.keep_states(decoder, num_blocks * kv_cache.block_size)
    generations = new_generations(num_blocks)
    if followers is not None:
        followers.allocate(num_blocks, memory.max_num_seqs)
    vocab_size = description.config.vocab_size
    grammars = Grammars(
        description.read_tokenizer, description.eos_token_ids, vocab_size=vocab_size
    )
    runner = ModelRunner(
        decoder,
        kv_cache,
        grammars,
        max_num_seqs=memory.max_num_seqs,
        max_model_len=chosen.max_model_len,
        followers=followers,
        deferral=_deferral(config),
    )
    progress(StartStep("warm_up"))
    _warm_up(runner, chosen, *sizes)
    proposer: Proposer | None = _prompt_lookup(config)
    if draft_decoder is not None:
        proposer = _draft_model(plan, draft_decoder, runner)
    scheduler = Scheduler(
        BlockPool(
            num_blocks,
            kv_cache.block_size,
            generations,
            enable_prefix_caching=config.enable_prefix_caching,
            windows=chosen.shape.groups.windows,
        ),
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        max_model_len=chosen.max_model_len,
        vocab_size=vocab_size,
        proposer=proposer,
    )
    # A CPU has no async scheduling, because the same threads plan and compute.
    launcher = runner if device.type != "cpu" else None
    adapters = None
    if memory_of_adapters is not None:
        is_running = scheduler.__contains__
        adapters = DeviceAdapters(memory_of_adapters, config, is_running, followers)
    engine = Engine(
        scheduler,
        runner,
        grammars=grammars,
        launcher=launcher,
        adapters=adapters,
        begin_thread=begin_thread,
    )
    return engine, kv_cache


def _warm_up(runner: ModelRunner, chosen: Choices, num_seqs: int, num_tokens: int) -> None:
    """Pick kernels and touch memory; on a GPU capture graphs; on a CPU choose thread counts."""
    max_model_len, is_cpu = chosen.max_model_len, chosen.device == "cpu"
    num_tokens = min(num_tokens, max_model_len - 1)
    runner.warm_up(min(num_tokens, CPU_WARM_UP_TOKENS) if is_cpu else num_tokens, num_seqs)
    if is_cpu:
        if runner.followers is None:
            runner.measure_threads(max_model_len)
        return
    runner.warm_up_tiles(max_model_len)
    if not chosen.config.enforce_eager:
        runner.capture(num_seqs)


def _deferral(config: EngineConfig) -> Deferral | None:
    asked = config.speculative_config
    return Deferral(asked.deferral) if asked is not None and asked.deferral else None


def _prompt_lookup(config: EngineConfig) -> PromptLookup | None:
    asked = config.speculative_config
    if asked is None or asked.method != "ngram":
        return None
    return PromptLookup(asked.num_speculative_tokens, asked.prompt_lookup_max)


def _draft_decoder(drafts: Choices, whole: Decoder) -> Decoder | MedusaHeads:
    if isinstance(drafts.model, DraftLayers):
        if drafts.model.is_medusa:
            return MedusaHeads(whole, drafts.model)
        make = HeadDecoder if drafts.model.is_head else first_layers_of
        return make(whole, drafts.model)
    dtype, quantization = FORMATS[drafts.dtype].dtype, drafts.config.quantization
    return load_model(drafts.model, dtype, whole.device, quantization=quantization)


def _draft_model(
    plan: EnginePlan, decoder: Decoder | MedusaHeads, whole: ModelRunner
) -> DraftModel | MedusaDrafts:
    """With as many blocks as the model for which it drafts has rows; Medusa heads need none.

    Args:
        whole: runs that model.
    """
    asked, drafts = plan.chosen.config.speculative_config, plan.chosen.drafts
    max_num_seqs = plan.memory.max_num_seqs
    num_blocks = plan.chosen.shape.groups.num_whole(whole.kv_cache.num_blocks)
    assert asked is not None and drafts is not None
    num_tokens = asked.num_speculative_tokens
    stream = new_stream(plan.device)
    if isinstance(decoder, MedusaHeads):
        heads = MedusaDrafts(decoder, whole, num_tokens, stream)
        heads.measure(max_num_seqs)
        return heads
    with torch.cuda.stream(stream):
        kv_cache = KVCache(drafts.shape, num_blocks, plan.device)
        of_runner = HeadRunner if isinstance(decoder, HeadDecoder) else ModelRunner
        runner = of_runner(
            decoder, kv_cache, max_num_seqs=max_num_seqs, max_model_len=drafts.max_model_len
        )
        _warm_up(runner, drafts, max_num_seqs, max_num_seqs + MISSING_TOKENS)
    if isinstance(runner, HeadRunner):
        drafting: DraftModel = HeadDrafts(runner, num_tokens, stream, whole=whole)
    else:
        drafting = DraftModel(runner, num_tokens, stream)
    drafting.measure(max_num_seqs)
    return drafting
