"""OpenAI's chats and text completions: response bodies, events of streams, and other JSON replies.

Clients expect these details of streams: `finish_reason` is null until a separate chunk ends the
choice, usage comes in an extra chunk and only if requested, the role comes first, and a stream that
fails ends without `[DONE]`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from disagg.api.refusals import error_json
from disagg.api.running_job import ChoiceDelta, Frames, RunningJob, ScoredToken
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError
from disagg.messages import TokenLogprobs
from disagg.text.answer_delta import CallDelta, join_calls
from disagg.text.detokenizer import TextStream
from disagg.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

Body = dict[str, Any]
_to_json = msgspec.json.Encoder().encode


def model_object(model: ServedModel) -> Body:
    """As vLLM's, whose benchmark finds the tokenizer by `root`; of an adapter it is a directory."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "disagg",
        "root": model.adapter.path if model.adapter else model.full_name or model.name,
        "parent": None if model.base is None else model.base.name,
        "max_model_len": model.max_model_len,
        "num_parameters": model.num_parameters,  # 0 if unknown
    }


# Log-probabilities


def _chat_logprobs(scored: Iterable[ScoredToken], tokenizer: Tokenizer) -> Body:
    def show(token_id: int, logprob: float) -> Body:
        raw, text = tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        show(token_id, scores.logprob) | {"top_logprobs": [show(*pair) for pair in scores.top]}
        for token_id, scores, _ in scored
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(run: RunningJob, answer: ChoiceDelta) -> Body | None:
    """Log-probabilities of an answer, behind those of its prompt if that is echoed."""
    if run.spec.sampling.logprobs is None:
        return None
    tokenizer, start = run.model.tokenizer, len(_echo(run, answer.index))
    scored = [each._replace(offset=start + each.offset) for each in answer.scored]
    texts: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    if run.spec.echo and answer.prompt_logprobs is not None:
        first, *others = _score_prompt(run, answer)
        # The first token of a prompt has no log-probabilities.
        texts, logprobs, tops, offsets = [tokenizer.token_text(first.token_id)], [None], [None], [0]
        scored = [*others, *scored]
    for token_id, scores, offset in scored:
        # The most likely tokens, and the chosen one if it is none of them, as OpenAI returns them.
        pairs = [*scores.top, (token_id, scores.logprob)]
        texts.append(tokenizer.token_text(token_id))
        logprobs.append(_finite(scores.logprob))
        tops.append({tokenizer.token_text(number): _finite(value) for number, value in pairs})
        offsets.append(offset)
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _score_prompt(run: RunningJob, answer: ChoiceDelta) -> Iterator[ScoredToken]:
    """The tokens of a prompt with their log-probabilities, which the first one does not have."""
    stream, num_chars = TextStream(run.model.tokenizer), 0
    scores = (TokenLogprobs(0.0), *(answer.prompt_logprobs or ()))
    for token_id, score in zip(run.requests[answer.index].token_ids, scores, strict=True):
        yield ScoredToken(token_id, score, num_chars)
        num_chars += len(stream.push(token_id))


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Body] | None]:
    """vLLM's `prompt_logprobs`.

    Args:
        token_ids: token ids of the prompt.
        scores: log-probabilities of all prompt tokens except the first.
    """
    found: list[dict[int, Body] | None] = [None]
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


# Whole answers


def usage_of(run: RunningJob) -> Body:
    return {
        **_usage(run.num_prompt_tokens, run.num_completion_tokens),
        "prompt_tokens_details": {"cached_tokens": run.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
    }


def _usage(num_prompt: int, num_completion: int) -> Body:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def chat_body(run: RunningJob) -> bytes:
    has_logprobs, tokenizer = run.spec.sampling.logprobs is not None, run.model.tokenizer
    choices = [
        {
            "index": answer.index,
            "message": _message(answer),
            "logprobs": _chat_logprobs(answer.scored, tokenizer) if has_logprobs else None,
            "finish_reason": answer.finish_reason,
            **_token_ids(run, answer),
        }
        for answer in run.kept
    ]
    return _body("chat.completion", run, choices, _of_prompt(run, run.kept[0]))


def _message(answer: ChoiceDelta) -> Body:
    is_plain = not answer.calls and not answer.reasoning
    message: Body = {
        "role": "assistant",
        "content": answer.text if is_plain else answer.text or None,
        "refusal": None,
    }
    if answer.reasoning:  # by its older and its newer name
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in join_calls(answer.calls)
        ]
    return message


def completion_body(run: RunningJob) -> bytes:
    choices = [
        {
            "index": answer.index,
            "text": _echo(run, answer.index) + answer.text,
            "logprobs": _completion_logprobs(run, answer),
            "finish_reason": answer.finish_reason,
            **_of_prompt(run, answer),
            **_token_ids(run, answer),
        }
        for answer in run.kept
    ]
    return _body("text_completion", run, choices, {})


def _body(kind: str, run: RunningJob, choices: Sequence[Body], more: Body) -> bytes:
    head = {"id": run.id, "object": kind, "created": run.created_unix_s, "model": run.model_name}
    return _to_json(head | {"choices": choices, "usage": usage_of(run)} | more)


def _of_prompt(run: RunningJob, answer: ChoiceDelta) -> Body:
    """The fields about the prompt of an answer that were requested."""
    fields = _prompt_token_ids(run, answer.index)
    if run.spec.shows_prompt_logprobs:
        prompt, scores = run.requests[answer.index].token_ids, answer.prompt_logprobs or ()
        fields["prompt_logprobs"] = prompt_logprobs(prompt, scores, run.model.tokenizer)
    return fields


def _prompt_token_ids(run: RunningJob, index: int) -> Body:
    is_asked = run.spec.return_token_ids
    return {"prompt_token_ids": run.requests[index].token_ids} if is_asked else {}


def _token_ids(run: RunningJob, answer: ChoiceDelta) -> Body:
    return {"token_ids": answer.token_ids} if run.spec.return_token_ids else {}


def _echo(run: RunningJob, index: int) -> str:
    return run.echoes[index // run.spec.num_choices] if run.echoes else ""


# Streams


class OpenAIFrames(Frames):
    """Events of a streamed answer: chunks, each with what one choice has gained."""

    kind: ClassVar[str]

    def __init__(self, run: RunningJob) -> None:
        super().__init__(run)
        self._models = [run.model.name] * len(run.requests)  # that answer, by choice
        self._num_tokens = [0] * len(run.requests)  # so far, by choice
        self._around: dict[int, list[bytes]] = {}  # by choice, see `_plain`

    def name_models(self) -> bool:
        for index, decision in enumerate(self._run.decisions):
            if decision is not None:
                self._models[index] = decision.model
        self._around.clear()
        return all(self._run.decisions)

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The chunk for `piece`, and if it is the last one, the chunk with its finish reason."""
        has_more = piece.scored or piece.token_ids or piece.reasoning or piece.calls
        if piece.text and not (has_more or piece.finish_reason or self._run.spec.continuous_usage):
            return self._plain(piece)
        events = b""
        self._num_tokens[piece.index] += piece.num_tokens
        if piece.text or has_more:
            logprobs = self._logprobs(piece) if piece.scored else None
            ids: Body = {"token_ids": piece.token_ids} if piece.token_ids else {}
            events = self._chunk(piece.index, self._gain(piece), logprobs, **ids)
        if piece.finish_reason is not None:
            nothing = self._gain(ChoiceDelta(piece.index))
            events += self._chunk(piece.index, nothing, finish_reason=piece.finish_reason)
        return events

    def _plain(self, piece: ChoiceDelta) -> bytes:
        """The chunk of a piece that is only text, as most are: what is around the text is known.

        Building a chunk takes four times as long, a third of an ingress's own work for a token.
        """
        around = self._around.get(piece.index)
        if around is None:
            chunk = self._chunk(piece.index, self._gain(ChoiceDelta(piece.index, text="\ufdd0")))
            around = self._around[piece.index] = chunk.split(_to_json("\ufdd0"))
        return around[0] + _to_json(piece.text) + around[1]

    def closing(self) -> bytes:
        """The usage chunk if it was requested, and `[DONE]`."""
        run = self._run
        if not run.spec.include_usage:
            return DONE
        return self._event(run.model_name, {"choices": [], "usage": usage_of(run)}) + DONE

    def error(self, error: DisaggError) -> bytes:
        return b"data: " + error_json(error) + b"\n\n"

    def _chunk(
        self,
        index: int,
        gain: Body,
        logprobs: Body | None = None,
        finish_reason: str | None = None,
        beside: Body | None = None,
        **more: Any,
    ) -> bytes:
        """An event with one choice.

        Args:
            beside: further fields of the event; `more` are those of the choice.
        """
        choice = {"index": index, **gain, "logprobs": logprobs, "finish_reason": finish_reason}
        body: Body = {"choices": [choice | more], **(beside or {})}
        if self._run.spec.continuous_usage:
            num_prompt_tokens = self._run.answers[index].num_prompt_tokens
            body["usage"] = _usage(num_prompt_tokens, self._num_tokens[index])
        elif self._run.spec.include_usage:
            body["usage"] = None
        return self._event(self._models[index], body)

    def _event(self, model: str, body: Body) -> bytes:
        run = self._run
        head = {"id": run.id, "object": self.kind, "created": run.created_unix_s, "model": model}
        return b"data: " + _to_json(head | body) + b"\n\n"

    @abstractmethod
    def _gain(self, piece: ChoiceDelta) -> Body:
        """The field of a choice with what `piece` adds."""

    @abstractmethod
    def _logprobs(self, piece: ChoiceDelta) -> Body | None:
        """Log-probabilities of the piece's tokens."""


class ChatFrames(OpenAIFrames):
    kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        delta = {"delta": {"role": "assistant", "content": ""}}
        first = self._chunk(0, delta, beside=_prompt_token_ids(self._run, 0))
        others = (self._chunk(index, delta) for index in range(1, len(self._run.requests)))
        return first + b"".join(others)

    def _gain(self, piece: ChoiceDelta) -> Body:
        delta: Body = {}
        if piece.reasoning:
            delta = {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if piece.text or not (piece.reasoning or piece.calls):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return {"delta": delta}

    def _logprobs(self, piece: ChoiceDelta) -> Body:
        return _chat_logprobs(piece.scored, self._run.model.tokenizer)


class CompletionFrames(OpenAIFrames):
    kind = "text_completion"

    def opening(self) -> bytes:
        run = self._run
        if not (run.echoes or run.spec.return_token_ids):
            return b""
        indices = range(len(run.requests))
        return b"".join(
            self._chunk(index, {"text": _echo(run, index)}, **_prompt_token_ids(run, index))
            for index in indices
        )

    def _gain(self, piece: ChoiceDelta) -> Body:
        return {"text": piece.text}

    def _logprobs(self, piece: ChoiceDelta) -> Body | None:
        return _completion_logprobs(self._run, piece)


def _call_delta(call: CallDelta) -> Body:
    if not call.name:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.number, "id": call.id, "type": "function", "function": function}
