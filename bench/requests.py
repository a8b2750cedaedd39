"""Requests for the engines that benchmarks run, as an ingress would send them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from disagg.blocks import hash_blocks
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.messages import GenerateRequest, SamplingParams

HASH_ROOT = b"bench"
BLOCK_SIZE = 16
# Of model families: the vocabulary, and what `generation_config.json` sets, so what a request gets
# that says nothing.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3": (151_936, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    "Llama-3": (128_256, {"temperature": 0.6, "top_p": 0.9}),
    "Qwen2.5": (
        152_064,
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    ),
}


def new_request(
    name: str | int,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    block_size: int,
    *,
    num_prompt_tokens: int | None = None,
) -> GenerateRequest:
    """A request without a deadline.

    Args:
        token_ids: the prompt, and perhaps output so far.
        num_prompt_tokens: None: all of them.
    """
    return GenerateRequest(
        request_id=str(name),
        model="bench",
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        hash_root=HASH_ROOT,
        block_hashes=tuple(hash_blocks(HASH_ROOT, token_ids, block_size)),
        sampling=sampling,
        deadline_unix_s=float("inf"),
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def new_sequences(
    num: int, vocab_size: int, context: int, sampling: dict[str, Any]
) -> list[EngineSequence]:
    """In the middle of their answers, for samplers without a model."""
    rng = random.Random(0)
    sequences = []
    for seed in range(num):
        tokens = rng.choices(range(vocab_size), k=context)
        wanted = SamplingParams(max_tokens=10_000, seed=seed, **sampling)
        sequences.append(EngineSequence(new_request(seed, tokens, wanted, BLOCK_SIZE)))
    return sequences
