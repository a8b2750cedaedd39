"""Engines with random weights of real shapes: nothing to download, nothing to store."""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence, Sequence

import torch

from disagg.blocks import hash_blocks
from disagg.engine.block_pool import BlockPool
from disagg.engine.engine import Engine
from disagg.engine.kv_cache import KVCache, KVShape
from disagg.engine.runner import ModelRunner
from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Sequence as EngineSequence
from disagg.kernels.kv_pages import format_of
from disagg.messages import GenerateRequest, SamplingParams
from disagg.models.decoder import random_decoder
from disagg.models.model_config import ModelConfig

HASH_ROOT = b"bench"


def num_parameters(config: ModelConfig) -> int:
    """Of the matrices that every token goes through, so without the embedding."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer + config.hidden_size * config.vocab_size


def new_engine(
    config: ModelConfig,
    device: torch.device,
    num_blocks: int,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    new_generations: Callable[[int], MutableSequence[int]] = lambda n: array("Q", bytes(8 * n)),
) -> tuple[Engine, KVCache]:
    """As `runner.build_engine`, with random weights in the place of a checkpoint's."""
    decoder = random_decoder(config, dtype, device)
    block_size = 64 if device.type == "cuda" else 16
    shape = KVShape.of(config, block_size, format_of(dtype))
    kv_cache = KVCache(shape, num_blocks, device)
    runner = ModelRunner(decoder, kv_cache)
    runner.warm_up(min(max_num_batched_tokens, num_blocks * block_size), max_num_seqs)
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size, new_generations(num_blocks)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    return Engine(scheduler, runner), kv_cache


def new_sequence(
    name: str,
    tokens: Sequence[int],
    num_prompt_tokens: int,
    max_tokens: int,
    block_size: int,
    *,
    hand_over: bool = False,
) -> EngineSequence:
    """A greedy request with prompt and perhaps output so far."""
    return EngineSequence(
        GenerateRequest(
            request_id=name,
            model="bench",
            token_ids=tuple(tokens),
            num_prompt_tokens=num_prompt_tokens,
            hash_root=HASH_ROOT,
            block_hashes=tuple(hash_blocks(HASH_ROOT, tokens, block_size)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            deadline_unix_s=float("inf"),
        ),
        hand_over=hand_over,
    )
