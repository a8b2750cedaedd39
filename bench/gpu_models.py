"""Engines with random weights of real model shapes: nothing to download and nothing to store."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from bench.requests import greedy, new_request
from bench.shapes import model_config
from disagg.capacity.efficiency import ON_CPU
from disagg.capacity.gpus import CPU_CORE, gpu_called
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import shape_of
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.messages import SamplingParams
from disagg.models.description import ModelDescription

_numbers = count()  # a request's name is used once


def placement_of(model: ModelDescription, device: torch.device) -> Placement | None:
    """For what `disagg plan` predicts of this device; None where it does not know it."""
    shape = shape_of(model)
    if device.type == "cpu":
        return Placement(shape, CPU_CORE, efficiency=ON_CPU)
    gpu = gpu_called(torch.cuda.get_device_name(device))
    return None if gpu is None else Placement(shape, gpu)


def new_sequence(
    name: str,
    tokens: Sequence[int],
    num_prompt_tokens: int,
    max_tokens: int,
    block_size: int,
    *,
    sampling: SamplingParams | None = None,
    hand_over: bool = False,
) -> EngineSequence:
    """A request, greedy unless `sampling` says more, with prompt and perhaps output so far."""
    sampling = sampling or greedy(max_tokens)
    request = new_request(name, tokens, sampling, block_size, num_prompt_tokens=num_prompt_tokens)
    return EngineSequence(request, hand_over=hand_over)


def join_sequences(
    engine: Engine, num_seqs: int, context: int, sampling: SamplingParams
) -> list[EngineSequence]:
    """Sequences of `context` random tokens that have their KV, as they arrive to be decoded.

    The KV is what lies in the blocks. The next step computes the last token of each.
    """
    pool, joined = engine.pool, []
    vocabulary = range(engine.scheduler.vocab_size)
    for _ in range(num_seqs):
        tokens = random.choices(vocabulary, k=context)
        sequence = new_sequence(
            f"decode-{next(_numbers)}",
            tokens,
            context,
            sampling.max_tokens,
            pool.block_size,
            sampling=sampling,
        )
        block_ids = engine.reserve(-(-context // pool.block_size))
        if block_ids is None:
            raise MemoryError(f"{num_seqs} sequences of {context} tokens do not fit the cache")
        sequence.block_ids, sequence.num_computed = block_ids, context - 1
        engine.join(sequence)
        joined.append(sequence)
    return joined


def write_shape(directory: Path, shape: str) -> Path:
    """A model directory of a shape of `bench.shapes`, but for its weights: of those it has none."""
    config = model_config(shape)
    fields = {
        "architectures": [config.family],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    header = b"{}"
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory
