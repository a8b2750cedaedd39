"""Requests for the engines that benchmarks run, as an ingress would send them."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.blocks import hash_blocks
from disagg.messages import GenerateRequest, SamplingParams

HASH_ROOT = b"bench"


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
