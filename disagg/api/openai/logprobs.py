"""Log-probabilities in answers, in the formats of chats, text completions and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from disagg.api.running_job import ScoredToken
from disagg.messages import TokenLogprobs
from disagg.text.detokenizer import TextStream
from disagg.text.tokenizer import Tokenizer


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in text completions. The first token of a prompt has none (null)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


PromptLogprobs = list[dict[int, dict[str, Any]] | None]


def chat_logprobs(scored: Iterable[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        shown(token.token_id, token.logprobs.logprob)
        | {"top_logprobs": [shown(*pair) for pair in token.logprobs.top]}
        for token in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    scored: Sequence[ScoredToken], tokenizer: Tokenizer, start: int
) -> CompletionLogprobs:
    """Log-probabilities of an answer. `start` is the length of the echoed prompt, or 0."""
    return CompletionLogprobs(
        [tokenizer.token_text(token.token_id) for token in scored],
        [_finite(token.logprobs.logprob) for token in scored],
        [_top_and_chosen(token, tokenizer) for token in scored],
        [start + token.offset for token in scored],
    )


def _top_and_chosen(token: ScoredToken, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens, and the chosen one if it is none of them, as OpenAI returns them."""
    pairs = [*token.logprobs.top, (token.token_id, token.logprobs.logprob)]
    return {tokenizer.token_text(number): _finite(value) for number, value in pairs}


def echoed_logprobs(
    token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs],
    answer: CompletionLogprobs,
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """The log-probabilities of a prompt, followed by those of the answer.

    Args:
        token_ids: token ids of the prompt.
        scores: log-probabilities of all prompt tokens except the first.
    """
    stream, num_chars, scored = TextStream(tokenizer), 0, []
    first, *others = token_ids
    num_chars += len(stream.push(first))
    for token_id, score in zip(others, scores, strict=True):
        scored.append(ScoredToken(token_id, score, num_chars))
        num_chars += len(stream.push(token_id))
    prompt = completion_logprobs(scored, tokenizer, 0)
    return CompletionLogprobs(
        [tokenizer.token_text(first), *prompt.tokens, *answer.tokens],
        [None, *prompt.token_logprobs, *answer.token_logprobs],
        [None, *prompt.top_logprobs, *answer.top_logprobs],
        [0, *prompt.text_offset, *answer.text_offset],
    )


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`. The arguments are those of `echoed_logprobs`."""
    found: PromptLogprobs = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranked = [(number, value, rank) for rank, (number, value) in enumerate(score.top, start=1)]
        found.append(
            {
                number: {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(number),
                }
                for number, value, rank in [(token_id, score.logprob, score.rank), *ranked]
            }
        )
    return found


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's value for "very unlikely"; JSON has no infinity
