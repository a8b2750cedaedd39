"""Requests as an ingress sends them, for tests of what serves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from disagg.blocks import hash_blocks, hash_root
from disagg.engine.sched.sequence import Sequence
from disagg.messages import GenerateRequest, SamplingParams

ROOT = hash_root("fake", 4)


def new_request(
    prompt: Iterable[int], output: Iterable[int] = (), *, block_size: int = 0, **fields: Any
) -> GenerateRequest:
    """A request for what comes after `output`, with the hashes of its blocks of `block_size`.

    Args:
        fields: of `GenerateRequest` and of `SamplingParams`, where they are not the usual ones.
    """
    prompt = tuple(prompt)
    tokens = (*prompt, *output)
    root = fields.get("hash_root", ROOT)
    sampling = {"max_tokens": 16} | {
        name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields
    }
    usual: dict[str, Any] = {
        "request_id": "request",
        "model": "fake",
        "token_ids": tokens,
        "num_prompt_tokens": len(prompt),
        "hash_root": ROOT,
        "block_hashes": tuple(hash_blocks(root, tokens, block_size)) if block_size else (),
        "sampling": SamplingParams(**sampling),
        "deadline_unix_s": 1e12,
    }
    return GenerateRequest(**(usual | fields))


def new_sequence(*tokens: Iterable[int], hand_over: bool = False, **fields: Any) -> Sequence:
    """The sequence of such a request."""
    return Sequence(new_request(*tokens, **fields), hand_over=hand_over)
