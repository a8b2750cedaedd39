"""The fourth step of a request: check that its tokens fit the model's context and vocabulary.

Also finds the tokens of the marks around reasoning, and refuses grammars that no worker could
follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from disagg.api.openai.structured_output import GrammarChecks
from disagg.api.refusals import invalid_value, too_long, unsupported
from disagg.api.request_spec import RequestSpec
from disagg.api.running_job import num_prompt_scores
from disagg.api.served_model import ServedModel
from disagg.messages import Grammar, SamplingParams, Thinking
from disagg.text.reasoning import ReasoningFormat, prompt_tail
from disagg.text.tool_parsers.harmony import ANALYSIS, FINAL_THEN

MAX_PROMPT_SCORES = 1 << 19  # largest number of prompt log-probabilities in one response


def truncated_to(spec: RequestSpec) -> int | None:
    """The number of last tokens to which each prompt is cut; None if prompts are not cut."""
    if spec.truncate_prompt_tokens != -1:
        return spec.truncate_prompt_tokens
    for_answer = spec.max_tokens or spec.default_max_tokens or 1
    return max(1, spec.model.max_model_len - for_answer)


async def fit(
    spec: RequestSpec, prompts: Sequence[Sequence[int]], checks: GrammarChecks
) -> SamplingParams:
    """The complete sampling parameters for `prompts` (token ids), except for the seed.

    Raises:
        InvalidRequest: a token id is not in the vocabulary, a prompt has no tokens, or the grammar
            cannot be followed.
        ContextLengthExceeded: a prompt, or a prompt and its answer together, is too long.
        Overloaded: too many grammars are being checked.
    """
    model, sampling, grammar = spec.model, spec.sampling, None
    max_tokens = _max_tokens(spec, prompts)
    num_scores = sum(num_prompt_scores(sampling, len(each)) for each in prompts)
    if num_scores * spec.num_choices > MAX_PROMPT_SCORES:
        raise invalid_value(
            "prompt_logprobs",
            f"the response would have {num_scores * spec.num_choices} log-probabilities of"
            f" prompt tokens; at most {MAX_PROMPT_SCORES} are allowed. Send several requests.",
        )
    for token_ids in prompts:
        check_ids(token_ids, model, spec.prompt_param)
    # The model's end tokens are not checked: their ids may be above those allowed in prompts.
    stops = [number for number in sampling.stop_token_ids if number not in model.eos_token_ids]
    check_ids(stops, model, "stop_token_ids")
    check_ids([token_id for token_id, _ in sampling.logit_bias], model, "logit_bias")
    check_ids(sampling.allowed_token_ids, model, "allowed_token_ids")
    bad_words = _tokens_of_words(spec.bad_words, model)
    _check_some_allowed(sampling, bad_words)
    if sampling.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens",
            f"{sampling.min_tokens} is above {max_tokens}, the largest number of tokens of the"
            " answer.",
        )
    if spec.grammar is not None:
        param, grammar = spec.grammar
        await checks.check(param, grammar, model)
    top_k = min(sampling.top_k, model.vocab_size)
    return replace(
        sampling,
        max_tokens=max_tokens,
        top_k=top_k,
        grammar=grammar,
        thinking=thinking_of(spec, grammar, prompts[0]),
        bad_words_token_ids=bad_words,
    )


def check_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raises `InvalidRequest` if a token id is not in the model's vocabulary."""
    if token_ids and (largest := max(token_ids)) >= model.vocab_size:
        # A tokenizer may have added tokens that the model does not have.
        tokenizer = model.tokenizer
        is_known = largest < tokenizer.num_ids
        named = f" ({tokenizer.token_text(largest)[:64]!r})" if is_known else ""
        raise invalid_value(
            param,
            f"token id {largest}{named} is not below {model.vocab_size}, the vocabulary size of"
            f" {model.name!r}.",
        )


def _tokens_of_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words, both with and without a space before the word.

    Left out are a sequence that ends with a token that is forbidden by itself, and one that the
    model cannot write: a tokenizer may have tokens, such as an added [PAD], that the model has not.
    """
    encode = model.tokenizer.encode
    texts = [text for word in words for text in (word, f" {word}")]
    encoded = {tuple(encode(text, add_special_tokens=False)) for text in texts} - {()}
    found = {word for word in encoded if max(word) < model.vocab_size}
    single = {word[0] for word in found if len(word) == 1}
    return tuple(sorted(word for word in found if len(word) == 1 or word[-1] not in single))


def _check_some_allowed(sampling: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
    """Raises `InvalidRequest` if no token could ever be chosen."""
    allowed = set(sampling.allowed_token_ids)
    if allowed and allowed <= {word[0] for word in bad_words if len(word) == 1}:
        raise invalid_value("bad_words", "they forbid all of allowed_token_ids.")
    if allowed and sampling.min_tokens and allowed <= set(sampling.stop_token_ids):
        raise invalid_value(
            "min_tokens", "it cannot be reached, because all of allowed_token_ids end the answer."
        )


def _max_tokens(spec: RequestSpec, prompts: Sequence[Sequence[int]]) -> int:
    """The largest number of tokens of each answer. It must fit after every prompt."""
    model, param, max_tokens = spec.model, spec.prompt_param, spec.max_tokens
    if not all(prompts):
        raise invalid_value(param, "the prompt has no tokens.")
    longest = max(map(len, prompts))
    room = model.max_model_len - longest
    if room < 1:
        raise too_long(
            f"The prompt is too long: it has {longest} tokens, and one of answer must fit.",
            model.max_model_len,
            param,
        )
    if max_tokens is not None and max_tokens > room:
        alone = max_tokens >= model.max_model_len
        raise too_long(
            f"{'max_tokens is too large' if alone else 'The prompt is too long for max_tokens'}:"
            f" max_tokens is {max_tokens}, the prompt has {longest} tokens, and at most {room} are"
            " left for the answer.",
            model.max_model_len,
            "max_tokens",
        )
    return max_tokens if max_tokens is not None else min(room, spec.default_max_tokens or room)


def thinking_of(
    spec: RequestSpec, grammar: Grammar | None, token_ids: Sequence[int]
) -> Thinking | None:
    """The reasoning settings of a request with the prompt `token_ids`; None if there are none.

    Raises:
        InvalidRequest: the request has a budget, but the model's marks are ordinary text or tokens
            that the model does not have, so that no budget can be enforced.
    """
    reasoning = spec.syntax.reasoning if spec.syntax else None
    budget = spec.thinking_token_budget
    if reasoning is None or (grammar is None and budget is None):
        return None
    model = spec.model
    marks = reasoning.ends[:1]
    if reasoning.is_harmony:
        marks = (*marks, reasoning.forced_end, FINAL_THEN)
    if any(token_id >= model.vocab_size for mark in marks for token_id in _ids(model, mark)):
        _refuse_budget(spec, "with a token that its weights do not have")
        return None
    if reasoning.is_harmony:
        return Thinking(
            starts=(_ids(model, ANALYSIS),),
            end=_ids(model, reasoning.ends[0]),
            forced_end=_ids(model, reasoning.forced_end),
            then=_ids(model, FINAL_THEN),
            is_framed=True,
            budget=budget,
        )
    end = _ids(model, reasoning.ends[0])
    if len(end) > 1:  # a model may write the same text with other tokens
        _refuse_budget(spec, "with ordinary text instead of a special token")
        return None
    tail = prompt_tail(model.tokenizer, token_ids)
    if grammar is not None and reasoning.is_closed(tail):
        return None  # the answer starts at once, without reasoning
    return Thinking(
        starts=_starts(reasoning, model),
        end=end,
        forced_end=end,
        is_open=reasoning.is_open(tail),
        budget=budget,
    )


def _refuse_budget(spec: RequestSpec, ends: str) -> None:
    if spec.thinking_token_budget is not None:
        raise unsupported(
            "thinking_token_budget", f"The model {spec.model.name!r} ends its reasoning {ends}."
        )


def _starts(reasoning: ReasoningFormat, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The marks that start reasoning, also with a line break before, as some models write it."""
    return tuple(_ids(model, before + mark) for mark in reasoning.starts for before in ("", "\n"))


def _ids(model: ServedModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))
