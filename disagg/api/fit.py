"""The fourth step of a request: check that its tokens fit the model's context and vocabulary.

Also refuses grammars that no worker could follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from disagg.api.openai.structured_output import GrammarChecks
from disagg.api.refusals import invalid_value
from disagg.api.served_model import ServedModel
from disagg.api.wanted import Wanted
from disagg.errors import ContextLengthExceeded
from disagg.messages import SamplingParams


async def fit(
    wanted: Wanted, prompts: Sequence[Sequence[int]], checks: GrammarChecks
) -> SamplingParams:
    """How the answers to `prompts`, in token ids, are sampled: complete but for the seed.

    Raises:
        InvalidRequest: a token id is not in the vocabulary, a prompt has no tokens, or the grammar
            cannot be followed.
        ContextLengthExceeded: a prompt, or the answer behind it, is too long.
        Overloaded: too many grammars are being looked at.
    """
    model, sampling, grammar = wanted.model, wanted.sampling, None
    max_tokens = _max_tokens(wanted, prompts)
    for token_ids in prompts:
        check_ids(token_ids, model, wanted.prompt_param)
    # The model's own ends may lie beyond what prompts may hold.
    stops = [number for number in sampling.stop_token_ids if number not in model.eos_token_ids]
    check_ids(stops, model, "stop_token_ids")
    if sampling.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens",
            f"{sampling.min_tokens} is above the {max_tokens} tokens that the answer may have.",
        )
    if wanted.grammar is not None:
        param, grammar = wanted.grammar
        await checks.check(param, grammar, model)
    top_k = min(sampling.top_k, model.vocab_size)
    return replace(sampling, max_tokens=max_tokens, top_k=top_k, grammar=grammar)


def check_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raises `InvalidRequest`."""
    if token_ids and max(token_ids) >= model.vocab_size:
        raise invalid_value(
            param,
            f"token id {max(token_ids)} is not below the vocabulary size of {model.name!r},"
            f" {model.vocab_size}.",
        )


def _max_tokens(wanted: Wanted, prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens each answer may have, which must fit behind every prompt."""
    model, param, asked = wanted.model, wanted.prompt_param, wanted.max_tokens
    if not all(prompts):
        raise invalid_value(param, "the prompt has no tokens.")
    longest = max(map(len, prompts))
    room = model.max_model_len - longest
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {longest} tokens; with at least one token of answer, the model"
            f" {model.name!r} takes at most {model.max_model_len - 1}. Shorten the prompt.",
            param=param,
        )
    if asked is not None and asked > room:
        raise ContextLengthExceeded(
            f"max_tokens is {asked}, but the model {model.name!r} takes {model.max_model_len}"
            f" tokens in all and the prompt has {longest}: at most {room} are left for the answer.",
            param="max_tokens",
        )
    return asked if asked is not None else min(room, wanted.default_max_tokens or room)
