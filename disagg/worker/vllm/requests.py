"""What vLLM is asked for a request: its sampling parameters, and what it cannot do."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from disagg.errors import EngineCannot
from disagg.messages import GenerateRequest, SamplingParams

SEED_BITS = 63


def check_request(request: GenerateRequest) -> None:
    """Refuse what vLLM would not follow exactly, instead of answering without it.

    Raises:
        EngineCannot
    """
    sampling = request.sampling
    has_begun = len(request.token_ids) > request.num_prompt_tokens
    if sampling.thinking is not None:
        raise EngineCannot(
            "This model runs on vLLM, where reasoning has no budget here, and a grammar cannot"
            " begin behind it. Leave out the budget, or the structured output."
        )
    if sampling.pooling is not None and sampling.pooling.token_ids:
        raise EngineCannot(
            "This model runs on vLLM, which scores texts only if it is started for that, with"
            ' --engine-args \'{"runner": "pooling", "convert": "classify"}\' (docs/engines.md).'
        )
    if sampling.kv_eviction is not None:
        raise EngineCannot(
            "This model runs on vLLM, which moves the KV of all tokens. Leave kv_eviction out.",
            param="kv_eviction",
        )
    if any(len(word) > 1 for word in sampling.bad_words_token_ids):
        raise EngineCannot(
            "This model runs on vLLM, where bad_words can be single tokens only.", param="bad_words"
        )
    if sampling.grammar is not None and has_begun:
        raise EngineCannot(
            "The worker of this request was lost, and vLLM cannot go on with structured output in"
            " the middle of an answer. Send the request again."
        )


def can_hand_over(request: GenerateRequest) -> bool:
    """Whether another engine may go on after the first token: nothing depends on what this one
    knows of the answer."""
    sampling = request.sampling
    return (
        sampling.grammar is None
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and not request.images  # only the engine knows how many tokens they have
        and num_left(request) > 1
    )


def num_left(request: GenerateRequest) -> int:
    """Tokens that the answer may still get."""
    return request.sampling.max_tokens - (len(request.token_ids) - request.num_prompt_tokens)


def sampling_arguments(
    request: GenerateRequest, max_tokens: int, kv_transfer_params: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`; `structured_outputs` as its own arguments."""
    sampling = request.sampling
    num_output = len(request.token_ids) - request.num_prompt_tokens
    bias = dict(sampling.logit_bias)
    bias.update({word[0]: float("-inf") for word in sampling.bad_words_token_ids})
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, sampling.min_tokens - num_output)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": seed_at(sampling.seed, num_output),
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs if request.scores_prompt else None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # `stop_token_ids` has the model's
        "detokenize": False,
    }
    if bias:
        arguments["logit_bias"] = bias
    if sampling.allowed_token_ids:
        arguments["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        arguments["structured_outputs"] = _structured(sampling)
    if kv_transfer_params:
        arguments["extra_args"] = {"kv_transfer_params": kv_transfer_params}
    return arguments


def seed_at(seed: int, num_output: int) -> int:
    """A seed for an answer that goes on after `num_output` tokens.

    vLLM draws numbers in a row, from the seed on: with the same seed the second part of an answer
    would be drawn with the numbers of the first.
    """
    if num_output:
        raw = hashlib.blake2b(f"{seed} {num_output}".encode(), digest_size=8).digest()
        seed = int.from_bytes(raw, "little")
    return seed % (1 << SEED_BITS)


def _structured(sampling: SamplingParams) -> dict[str, Any]:
    grammar = sampling.grammar
    assert grammar is not None
    match grammar.kind:
        case "json":
            return {"json": grammar.source}
        case "regex":
            return {"regex": grammar.source}
        case "choice":
            return {"choice": json.loads(grammar.source)}
        case "lark":
            return {"grammar": grammar.source}
