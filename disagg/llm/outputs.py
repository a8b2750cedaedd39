"""Answers in the shape of vLLM's `RequestOutput`, made from what the API made of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.api.openai.answers import prompt_logprobs
from disagg.api.running_job import ChoiceDelta, RunningJob, ScoredToken
from disagg.text.answer_delta import CallDelta, join_calls
from disagg.text.tokenizer import Tokenizer


@dataclass
class Logprob:
    """The log-probability of a token; `rank` is 1 for the most likely one, None if not known."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # token id -> its log-probability, at one position


@dataclass
class CompletionOutput:
    """One answer, or what is new of it in a stream.

    Attributes:
        logprobs: one for each token, if requested: the chosen token's and the most likely ones'.
        finish_reason: "stop", "length" or "tool_calls"; None while it goes on.
        stop_reason: the stop string or stop token that ended it; None for the model's own end.
        reasoning: what the model wrote before the answer, which is not part of `text`.
        tool_calls: calls of the offered functions, each with `id`, `name` and `arguments` (JSON).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: list[CallDelta] = field(default_factory=list)


@dataclass
class RequestOutput:
    """The answers to one prompt.

    Attributes:
        prompt: the prompt's text; None if it was given as token ids or messages.
        prompt_logprobs: one for each of its tokens, None for the first, if requested.
        outputs: one for each of the `n` answers; in a stream, those that have something new.
        num_cached_tokens: prompt tokens whose KV was cached.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0


def request_output(
    run: RunningJob, answers: Sequence[ChoiceDelta], prompt: str | None
) -> RequestOutput:
    """What a job with one prompt has answered.

    Args:
        answers: whole answers (`run.kept`), or the pieces of one batch.
        prompt: its text, to be repeated.
    """
    token_ids, tokenizer = run.requests[0].token_ids, run.model.tokenizer
    scores, of_prompt = answers[0].prompt_logprobs, None
    if scores is not None:
        of_prompt = [
            None if each is None else {token: Logprob(**score) for token, score in each.items()}
            for each in prompt_logprobs(token_ids, scores, tokenizer)
        ]
    return RequestOutput(
        run.id,
        prompt,
        list(token_ids),
        [_completion_output(run, answer) for answer in answers],
        finished=None not in run.finish_reasons,
        prompt_logprobs=of_prompt,
        num_cached_tokens=run.num_cached_tokens,
    )


def _completion_output(run: RunningJob, answer: ChoiceDelta) -> CompletionOutput:
    has_logprobs = run.spec.sampling.logprobs is not None
    return CompletionOutput(
        answer.index,
        answer.text,
        answer.token_ids,
        sum(token.logprobs.logprob for token in answer.scored) if has_logprobs else None,
        [_logprobs(token, run.model.tokenizer) for token in answer.scored]
        if has_logprobs
        else None,
        answer.finish_reason,
        _stop_reason(run, answer),
        answer.reasoning,
        join_calls(answer.calls),
    )


def _logprobs(token: ScoredToken, tokenizer: Tokenizer) -> Logprobs:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.logprobs.top, start=1)}
    chosen = (token.token_id, token.logprobs.logprob)
    return {
        token_id: Logprob(logprob, ranks.get(token_id), tokenizer.token_text(token_id))
        for token_id, logprob in (chosen, *token.logprobs.top)
    }


def _stop_reason(run: RunningJob, answer: ChoiceDelta) -> int | str | None:
    if answer.stop_string is not None or answer.finish_reason != "stop" or not answer.token_ids:
        return answer.stop_string
    last = answer.token_ids[-1]
    own = set(run.requests[answer.index].sampling.stop_token_ids) - set(run.model.eos_token_ids)
    return last if last in own else None
