"""OpenAI's chats and text completions: response bodies, events of streams, and other JSON replies.

Clients expect these details of streams: `finish_reason` is null until a separate chunk ends the
choice, usage comes in an extra chunk and only if requested, the role comes first, and a stream that
fails ends without `[DONE]`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from disagg.api.refusals import error_frame
from disagg.api.running_job import ChoiceDelta, Frames, RunningJob, ScoredToken
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError
from disagg.messages import TokenLogprobs
from disagg.text.answer_delta import CallDelta, join_calls
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


_to_json = msgspec.json.Encoder().encode
Body = dict[str, Any]


def models_body(models: Iterable[ServedModel]) -> bytes:
    return _to_json({"object": "list", "data": [_described(model) for model in models]})


def model_body(model: ServedModel) -> bytes:
    return _to_json(_described(model))


def _root(model: ServedModel) -> str:
    """As vLLM's: its benchmark finds the tokenizer by it. Of an adapter it is the directory."""
    return model.adapter.path if model.adapter else model.full_name or model.name


def _described(model: ServedModel) -> Body:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "disagg",
        "root": _root(model),
        "parent": None if model.base is None else model.base.name,
        "max_model_len": model.max_model_len,
        "num_parameters": model.num_parameters,  # 0 if unknown
    }


def usage_of(run: RunningJob) -> Body:
    num_prompt, num_completion = run.num_prompt_tokens, run.num_completion_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": run.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
    }


def chat_body(run: RunningJob) -> bytes:
    has_logprobs, tokenizer = run.spec.sampling.logprobs is not None, run.model.tokenizer
    choices = [
        {
            "index": answer.index,
            "message": _message(answer),
            "logprobs": chat_logprobs(answer.scored, tokenizer) if has_logprobs else None,
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
            "text": echo_of(run, answer.index) + answer.text,
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


def _completion_logprobs(run: RunningJob, answer: ChoiceDelta) -> CompletionLogprobs | None:
    if run.spec.sampling.logprobs is None:
        return None
    tokenizer, echo = run.model.tokenizer, echo_of(run, answer.index)
    own = completion_logprobs(answer.scored, tokenizer, len(echo))
    if not run.spec.echo:
        return own
    prompt = run.requests[answer.index].token_ids
    return echoed_logprobs(prompt, answer.prompt_logprobs or (), own, tokenizer)


def _of_prompt(run: RunningJob, answer: ChoiceDelta) -> Body:
    """The fields about the prompt of an answer that were requested."""
    prompt, fields = run.requests[answer.index].token_ids, Body()
    if run.spec.shows_prompt_logprobs:
        scores = answer.prompt_logprobs or ()
        fields["prompt_logprobs"] = prompt_logprobs(prompt, scores, run.model.tokenizer)
    if run.spec.return_token_ids:
        fields["prompt_token_ids"] = prompt
    return fields


def _token_ids(run: RunningJob, answer: ChoiceDelta) -> Body:
    return {"token_ids": answer.token_ids} if run.spec.return_token_ids else {}


def echo_of(run: RunningJob, index: int) -> str:
    return run.echoes[index // run.spec.num_choices] if run.echoes else ""


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class OpenAIFrames(Frames):
    """Events of a streamed answer. Their constant parts are built once per request."""

    kind: ClassVar[str]
    gain: ClassVar[bytes]  # the JSON key of new text

    def __init__(self, run: RunningJob) -> None:
        super().__init__(run)
        self._tokenizer = run.model.tokenizer
        self._heads = [self._head(i, run.model.name) for i in range(len(run.requests))]
        self._set_tail(b',"usage":null}\n\n' if run.spec.include_usage else b"}\n\n")
        # Tokens of each choice so far, where each event says how many.
        self._num_tokens = [0] * len(run.requests) if run.spec.continuous_usage else None

    def name_models(self) -> bool:
        names = [None if each is None else each.model for each in self._run.decisions]
        for index, name in enumerate(names):
            if name is not None:
                self._heads[index] = self._head(index, name)
        return None not in names

    def _preamble(self, model_name: str) -> bytes:
        run = self._run
        return (
            b'data: {"id":' + _to_json(run.id) + b',"object":' + _to_json(self.kind)
            + b',"created":%d' % run.created_unix_s
            + b',"model":' + _to_json(model_name) + b',"choices":['
        )  # fmt: skip

    def _head(self, index: int, model_name: str) -> bytes:
        """The event of a choice up to the value of its new text."""
        return self._preamble(model_name) + b'{"index":%d,' % index + self.gain

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The event for `piece`, and if it is the last one, the event with its finish reason."""
        events = b""
        if self._num_tokens is not None:
            self._count(piece, self._num_tokens)
        if piece.scored or piece.token_ids:
            logprobs = self._logprobs(piece) if piece.scored else b"null"
            ids = b',"token_ids":' + _to_json(piece.token_ids) if piece.token_ids else b""
            events = self._event(piece.index, self._gain(piece), logprobs, more=ids)
        elif piece.text or piece.reasoning or piece.calls:
            events = self._heads[piece.index] + self._gain(piece) + self._plain_end
        if piece.finish_reason is not None:
            nothing = self._gain(ChoiceDelta(piece.index))
            events += self._event(piece.index, nothing, reason=_to_json(piece.finish_reason))
        return events

    def closing(self) -> bytes:
        """The usage chunk if it was requested, and `[DONE]`."""
        if not self._run.spec.include_usage:
            return DONE
        preamble = self._preamble(self._run.model_name)
        return preamble + b'],"usage":' + _to_json(usage_of(self._run)) + b"}\n\n" + DONE

    def _count(self, piece: ChoiceDelta, num_tokens: list[int]) -> None:
        """Let the events of `piece` carry the usage of its choice so far, as vLLM's do."""
        num_tokens[piece.index] += piece.num_tokens
        num_prompt, num = self._run.requests[piece.index].num_prompt_tokens, num_tokens[piece.index]
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
        self._set_tail(b',"usage":' + usage % (num_prompt, num, num_prompt + num) + b"}\n\n")

    def _set_tail(self, tail: bytes) -> None:
        """Set the end of the following events, from the end of their choices on."""
        self._tail = tail
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + tail

    @abstractmethod
    def _gain(self, piece: ChoiceDelta) -> bytes:
        """The JSON value of the key `gain` for `piece`."""

    def _prompt_token_ids(self, index: int) -> bytes:
        """The field with the prompt's token ids, if they were requested."""
        if not self._run.spec.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + _to_json(self._run.requests[index].token_ids)

    def error(self, error: DisaggError) -> bytes:
        return error_frame(error)

    @abstractmethod
    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        """Log-probabilities of the piece's tokens."""

    def _event(
        self,
        index: int,
        gain: bytes,
        logprobs: bytes = b"null",
        reason: bytes = b"null",
        more: bytes = b"",
        beside: bytes = b"",
    ) -> bytes:
        """Build one event from JSON.

        Args:
            more: further fields of the choice.
            beside: further fields of the event.
        """
        choice = b'%b%b,"logprobs":%b,"finish_reason":%b%b}]'
        begun = choice % (self._heads[index], gain, logprobs, reason, more)
        return begun + beside + self._tail


class ChatFrames(OpenAIFrames):
    kind = "chat.completion.chunk"
    gain = b'"delta":'

    def opening(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        first = self._event(0, delta, beside=self._prompt_token_ids(0))
        others = (self._event(index, delta) for index in range(1, len(self._run.requests)))
        return first + b"".join(others)

    def _gain(self, piece: ChoiceDelta) -> bytes:
        """The delta for `piece`. Most pieces have only text."""
        if not (piece.reasoning or piece.calls):
            return b'{"content":' + _to_json(piece.text) + b"}"
        parts = []
        if piece.reasoning:
            reasoning = _to_json(piece.reasoning)
            parts.append(b'"reasoning_content":%b,"reasoning":%b' % (reasoning, reasoning))
        if piece.text:
            parts.append(b'"content":' + _to_json(piece.text))
        if piece.calls:
            parts.append(b'"tool_calls":[%b]' % b",".join(map(_call_delta, piece.calls)))
        return b"{%b}" % b",".join(parts)

    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        return _to_json(chat_logprobs(piece.scored, self._tokenizer))


class CompletionFrames(OpenAIFrames):
    kind = "text_completion"
    gain = b'"text":'

    def opening(self) -> bytes:
        if not (self._run.echoes or self._run.spec.return_token_ids):
            return b""
        return b"".join(
            self._event(
                index,
                _to_json(echo_of(self._run, index)),
                more=self._prompt_token_ids(index),
            )
            for index in range(len(self._run.requests))
        )

    def _gain(self, piece: ChoiceDelta) -> bytes:
        return _to_json(piece.text)

    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        start = len(echo_of(self._run, piece.index))
        return _to_json(completion_logprobs(piece.scored, self._tokenizer, start))


def _call_delta(call: CallDelta) -> bytes:
    """A delta of a call. It is made for each token of arguments, so it avoids dictionaries."""
    if call.name:
        function = {"name": call.name, "arguments": call.arguments}
        first = {"index": call.number, "id": call.id, "type": "function", "function": function}
        return _to_json(first)
    arguments = _to_json(call.arguments)
    return b'{"index":%d,"function":{"arguments":%b}}' % (call.number, arguments)
