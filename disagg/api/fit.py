"""The fourth step of a request: check that its tokens fit the model's context and vocabulary.

Also refuses grammars that no worker could follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from disagg.api.openai.structured_output import GrammarChecks
from disagg.api.refusals import invalid_value
from disagg.api.running_job import num_prompt_scores
from disagg.api.served_model import ServedModel
from disagg.api.thinking import thinking_of
from disagg.api.wanted import Wanted
from disagg.errors import ContextLengthExceeded
from disagg.messages import SamplingParams

MAX_PROMPT_SCORES = 1 << 19  # log-probabilities of prompts in one answer


def truncated_to(wanted: Wanted) -> int | None:
    """The number of its last tokens that each prompt is cut to; None: it is left whole."""
    if wanted.truncate_prompt_tokens != -1:
        return wanted.truncate_prompt_tokens
    for_answer = wanted.max_tokens or wanted.default_max_tokens or 1
    return max(1, wanted.model.max_model_len - for_answer)


async def fit(
    wanted: Wanted, prompts: Sequence[Sequence[int]], checks: GrammarChecks
) -> SamplingParams:
    """The sampling parameters for the answers to `prompts` (token ids), complete but for the seed.

    Raises:
        InvalidRequest: a token id is not in the vocabulary, a prompt has no tokens, or the grammar
            cannot be followed.
        ContextLengthExceeded: a prompt, or prompt and answer together, are too long.
        Overloaded: too many grammars are being checked.
    """
    model, sampling, grammar = wanted.model, wanted.sampling, None
    max_tokens = _max_tokens(wanted, prompts)
    num_scores = sum(num_prompt_scores(sampling, len(each)) for each in prompts)
    if num_scores * wanted.num_choices > MAX_PROMPT_SCORES:
        raise invalid_value(
            "prompt_logprobs",
            f"{num_scores * wanted.num_choices} log-probabilities of prompts are asked for, at most"
            f" {MAX_PROMPT_SCORES} are given. Send several requests.",
        )
    for token_ids in prompts:
        check_ids(token_ids, model, wanted.prompt_param)
    # The model's own ends may lie beyond what prompts may hold.
    stops = [number for number in sampling.stop_token_ids if number not in model.eos_token_ids]
    check_ids(stops, model, "stop_token_ids")
    check_ids([token_id for token_id, _ in sampling.logit_bias], model, "logit_bias")
    check_ids(sampling.allowed_token_ids, model, "allowed_token_ids")
    bad_words = _tokens_of_words(wanted.bad_words, model)
    _check_some_allowed(sampling, bad_words)
    if sampling.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens",
            f"{sampling.min_tokens} is above the {max_tokens} tokens that the answer may have.",
        )
    if wanted.grammar is not None:
        param, grammar = wanted.grammar
        await checks.check(param, grammar, model)
    top_k = min(sampling.top_k, model.vocab_size)
    return replace(
        sampling,
        max_tokens=max_tokens,
        top_k=top_k,
        grammar=grammar,
        thinking=thinking_of(wanted, grammar, prompts[0]),
        bad_words_token_ids=bad_words,
    )


def check_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raises `InvalidRequest`."""
    if token_ids and max(token_ids) >= model.vocab_size:
        raise invalid_value(
            param,
            f"token id {max(token_ids)} is not below the vocabulary size of {model.name!r},"
            f" {model.vocab_size}.",
        )


def _tokens_of_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The token sequences of the words, within a text and at its beginning; the shortest ones."""
    encode = model.tokenizer.encode
    texts = [text for word in words for text in (word, f" {word}")]
    found = {tuple(encode(text, add_special_tokens=False)) for text in texts} - {()}
    single = {word[0] for word in found if len(word) == 1}
    return tuple(sorted(word for word in found if len(word) == 1 or word[-1] not in single))


def _check_some_allowed(sampling: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
    """Raises `InvalidRequest` when no token could be chosen."""
    allowed = set(sampling.allowed_token_ids)
    if allowed and allowed <= {word[0] for word in bad_words if len(word) == 1}:
        raise invalid_value("bad_words", "All of allowed_token_ids are among them.")
    if allowed and sampling.min_tokens and allowed <= set(sampling.stop_token_ids):
        raise invalid_value("min_tokens", "All of allowed_token_ids end the answer.")


def _max_tokens(wanted: Wanted, prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that each answer may have. It must fit after every prompt."""
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
