"""OpenAI's chats and text completions: response bodies, events of streams, and other JSON replies.

Clients expect these details of streams: `finish_reason` is null until a separate chunk ends the
choice, usage comes in an extra chunk and only if requested, the role comes first, and a stream that
fails ends without `[DONE]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import msgspec

from disagg.api.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from disagg.api.refusals import error_frame
from disagg.api.running_job import ChoiceDelta, Job, RunningJob
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError
from disagg.text.answer_delta import CallDelta, joined

_to_json = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """A delta of a call. Only the first one has `id`, `type` and the function's name."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # vLLM's newer name of the same
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str  # as vLLM's: what was served; its benchmark finds the tokenizer by it
    num_parameters: int = 0  # 0 if unknown
    parent: None = None
    object: Literal["model"] = "model"
    owned_by: str = "disagg"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


def models_body(models: Iterable[ServedModel]) -> bytes:
    return _to_json(ModelList([_described(model) for model in models]))


def model_body(model: ServedModel) -> bytes:
    return _to_json(_described(model))


def _described(model: ServedModel) -> Model:
    root = model.full_name or model.name
    return Model(model.name, model.created_unix_s, model.max_model_len, root, model.num_parameters)


def usage_of(run: RunningJob) -> Usage:
    num_prompt, num_completion = run.job.num_prompt_tokens, run.num_completion_tokens
    return Usage(
        num_prompt,
        num_completion,
        num_prompt + num_completion,
        PromptTokensDetails(run.num_cached_tokens),
        CompletionTokensDetails(run.num_reasoning_tokens),
    )


def chat_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    job = run.job
    choices = [
        ChatChoice(
            answer.index,
            _message(answer),
            None
            if job.spec.sampling.logprobs is None
            else chat_logprobs(answer.scored, job.model.tokenizer),
            answer.finish_reason,
            token_ids=_token_ids(job, answer),
        )
        for answer in answers
    ]
    return _to_json(
        ChatCompletion(
            job.id,
            job.created_unix_s,
            run.model_name,
            choices,
            usage_of(run),
            prompt_logprobs=_prompt_logprobs(job, answers[0]),
            prompt_token_ids=_prompt_token_ids(job, 0),
        )
    )


def _message(answer: ChoiceDelta) -> AssistantMessage:
    if not answer.calls and not answer.reasoning:
        return AssistantMessage(answer.text)
    message = AssistantMessage(answer.text or None)
    if answer.reasoning:
        message.reasoning_content = message.reasoning = answer.reasoning
    if answer.calls:
        message.tool_calls = [
            MessageToolCall(call.id, CalledFunction(call.name, call.arguments))
            for call in joined(answer.calls)
        ]
    return message


def completion_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    job = run.job
    choices = [
        CompletionChoice(
            answer.index,
            echo_of(job, answer.index) + answer.text,
            _completion_logprobs(job, answer),
            answer.finish_reason,
            prompt_logprobs=_prompt_logprobs(job, answer),
            prompt_token_ids=_prompt_token_ids(job, answer.index),
            token_ids=_token_ids(job, answer),
        )
        for answer in answers
    ]
    return _to_json(Completion(job.id, job.created_unix_s, run.model_name, choices, usage_of(run)))


def _completion_logprobs(job: Job, answer: ChoiceDelta) -> CompletionLogprobs | None:
    if job.spec.sampling.logprobs is None:
        return None
    tokenizer, echo = job.model.tokenizer, echo_of(job, answer.index)
    own = completion_logprobs(answer.scored, tokenizer, len(echo))
    if not job.spec.echo:
        return own
    prompt = job.requests[answer.index].token_ids
    return echoed_logprobs(prompt, answer.prompt_logprobs or (), own, tokenizer)


def _prompt_logprobs(job: Job, answer: ChoiceDelta) -> PromptLogprobs | msgspec.UnsetType:
    if not job.spec.shows_prompt_logprobs:
        return msgspec.UNSET
    prompt = job.requests[answer.index].token_ids
    return prompt_logprobs(prompt, answer.prompt_logprobs or (), job.model.tokenizer)


def _prompt_token_ids(job: Job, index: int) -> list[int] | msgspec.UnsetType:
    return list(job.requests[index].token_ids) if job.spec.return_token_ids else msgspec.UNSET


def _token_ids(job: Job, answer: ChoiceDelta) -> list[int] | msgspec.UnsetType:
    return answer.token_ids if job.spec.return_token_ids else msgspec.UNSET


def echo_of(job: Job, index: int) -> str:
    return job.echoes[index // job.spec.num_choices] if job.echoes else ""


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class OpenAIFrames(ABC):
    """Events of a streamed answer. Their constant parts are built once per request."""

    kind: ClassVar[str]
    gain: ClassVar[bytes]  # the JSON key of new text

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer = job.model.tokenizer
        self._heads = [self._head(i, job.model.name) for i in range(len(job.requests))]
        self._set_tail(b',"usage":null}\n\n' if job.spec.include_usage else b"}\n\n")
        # Tokens of each choice so far, where each event says how many.
        self._num_tokens = [0] * len(job.requests) if job.spec.continuous_usage else None

    def name_models(self, run: RunningJob) -> bool:
        """Name the models that the cascade chose so far. Returns whether it chose for all."""
        names = [None if each is None else each.model for each in run.decisions]
        for index, name in enumerate(names):
            if name is not None:
                self._heads[index] = self._head(index, name)
        return None not in names

    def _preamble(self, model_name: str) -> bytes:
        job = self._job
        return (
            b'data: {"id":' + _to_json(job.id) + b',"object":' + _to_json(self.kind)
            + b',"created":%d' % job.created_unix_s
            + b',"model":' + _to_json(model_name) + b',"choices":['
        )  # fmt: skip

    def _head(self, index: int, model_name: str) -> bytes:
        """The event of a choice up to the value of its new text."""
        return self._preamble(model_name) + b'{"index":%d,' % index + self.gain

    @abstractmethod
    def opening(self) -> bytes:
        """The events before the first token of each choice."""

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The event for `piece`, and if it is the last one, the event with its finish reason."""
        events = b""
        if self._num_tokens is not None:
            self._count(piece, self._num_tokens)
        if piece.scored or piece.token_ids:
            logprobs = self._logprobs(piece) if piece.scored else b"null"
            ids = b',"token_ids":' + _to_json(piece.token_ids) if piece.token_ids else b""
            events = self._event(piece.index, self._gain(piece), logprobs, b"null", ids)
        elif piece.text or piece.reasoning or piece.calls:
            events = self._heads[piece.index] + self._gain(piece) + self._plain_end
        if piece.finish_reason is not None:
            reason = _to_json(piece.finish_reason)
            events += self._event(piece.index, self._text(""), b"null", reason)
        return events

    def closing(self, run: RunningJob) -> bytes:
        """The usage chunk if it was requested, and `[DONE]`."""
        if not self._job.spec.include_usage:
            return DONE
        preamble = self._preamble(run.model_name)
        return preamble + b'],"usage":' + _to_json(usage_of(run)) + b"}\n\n" + DONE

    def _count(self, piece: ChoiceDelta, num_tokens: list[int]) -> None:
        """Let the events of `piece` carry the usage of its choice so far, as vLLM's do."""
        num_tokens[piece.index] += piece.num_tokens
        num_prompt, num = self._job.requests[piece.index].num_prompt_tokens, num_tokens[piece.index]
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
        if not self._job.spec.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + _to_json(self._job.requests[index].token_ids)

    def error(self, error: DisaggError) -> bytes:
        return error_frame(error)

    @abstractmethod
    def _text(self, text: str) -> bytes:
        """The JSON value of the key `gain` for new text."""

    @abstractmethod
    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        """Log-probabilities of the piece's tokens."""

    def _event(
        self,
        index: int,
        gain: bytes,
        logprobs: bytes,
        reason: bytes,
        more: bytes = b"",
        beside: bytes = b"",
    ) -> bytes:
        """Build one event from JSON.

        Args:
            more: further fields of the choice.
            beside: further fields of the event.
        """
        return b"".join(
            (
                self._heads[index],
                gain,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                reason,
                more,
                b"}]",
                beside,
                self._tail,
            )
        )


class ChatFrames(OpenAIFrames):
    kind = "chat.completion.chunk"
    gain = b'"delta":'

    def opening(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        ids = self._prompt_token_ids(0)
        events = [self._event(0, delta, b"null", b"null", beside=ids)]
        events += [
            self._event(i, delta, b"null", b"null") for i in range(1, len(self._job.requests))
        ]
        return b"".join(events)

    def _gain(self, piece: ChoiceDelta) -> bytes:
        """The delta for `piece`. Most pieces have only one of reasoning, text and calls."""
        if not (piece.reasoning or piece.calls):
            return b'{"content":' + _to_json(piece.text) + b"}"
        if not (piece.reasoning or piece.text):
            return b"{" + _call_deltas(piece.calls) + b"}"
        parts = []
        if piece.reasoning:
            reasoning = _to_json(piece.reasoning)
            parts.append(b'"reasoning_content":%b,"reasoning":%b' % (reasoning, reasoning))
        if piece.text:
            parts.append(b'"content":' + _to_json(piece.text))
        if piece.calls:
            parts.append(_call_deltas(piece.calls))
        return b"{%b}" % b",".join(parts)

    def _text(self, text: str) -> bytes:
        return b'{"content":' + _to_json(text) + b"}"

    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        return _to_json(chat_logprobs(piece.scored, self._tokenizer))


class CompletionFrames(OpenAIFrames):
    kind = "text_completion"
    gain = b'"text":'

    def opening(self) -> bytes:
        if not (self._job.echoes or self._job.spec.return_token_ids):
            return b""
        indices = range(len(self._job.requests))
        events = (
            self._event(
                index,
                self._text(echo_of(self._job, index)),
                b"null",
                b"null",
                self._prompt_token_ids(index),
            )
            for index in indices
        )
        return b"".join(events)

    def _gain(self, piece: ChoiceDelta) -> bytes:
        return _to_json(piece.text)

    def _text(self, text: str) -> bytes:
        return _to_json(text)

    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        start = len(echo_of(self._job, piece.index))
        return _to_json(completion_logprobs(piece.scored, self._tokenizer, start))


def _call_deltas(calls: Sequence[CallDelta]) -> bytes:
    deltas = _call_delta(calls[0]) if len(calls) == 1 else b",".join(map(_call_delta, calls))
    return b'"tool_calls":[' + deltas + b"]"


def _call_delta(call: CallDelta) -> bytes:
    """A delta of a call. It is made for each token of arguments, so it avoids structs."""
    if call.name:
        function = FunctionDelta(call.arguments, call.name)
        return _to_json(ToolCallDelta(call.number, function, call.id, "function"))
    arguments = _to_json(call.arguments)
    return b'{"index":%d,"function":{"arguments":%b}}' % (call.number, arguments)
