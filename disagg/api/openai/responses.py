"""OpenAI responses: whole bodies, and server-sent events built from bytes prepared once.

Shapes follow the specification where clients are known to be strict: `finish_reason` is present
and null until a chunk of its own ends the choice, usage comes in one extra chunk and only when
asked for, the role comes first, and a stream that fails ends without `[DONE]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import msgspec

from disagg.api.openai.answers import ChoiceDelta, Job, RunningJob, ScoredToken
from disagg.api.openai.tool_calls import Call
from disagg.api.refusals import error_json
from disagg.errors import DisaggError
from disagg.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

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


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct):
    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


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
    root: str
    num_parameters: int = 0  # 0: not known
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


def usage_of(run: RunningJob) -> Usage:
    num_prompt, num_completion = run.job.num_prompt_tokens, run.num_completion_tokens
    return Usage(
        num_prompt,
        num_completion,
        num_prompt + num_completion,
        PromptTokensDetails(run.num_cached_tokens),
        CompletionTokensDetails(),
    )


def chat_logprobs(scored: Iterable[ScoredToken], tokenizer: Tokenizer) -> ChatLogprobs:
    def top(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TopLogprob(tokenizer.token_text(token_id), _finite(logprob), list(raw))

    content = []
    for token in scored:
        chosen = top(token.token_id, token.logprobs.logprob)
        others = [top(*pair) for pair in token.logprobs.top]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, others))
    return ChatLogprobs(content)


def completion_logprobs(
    scored: Sequence[ScoredToken], tokenizer: Tokenizer, start: int
) -> CompletionLogprobs:
    """`start` is the length of the prompt's text where that is repeated before the answer."""
    return CompletionLogprobs(
        [tokenizer.token_text(token.token_id) for token in scored],
        [_finite(token.logprobs.logprob) for token in scored],
        [
            {tokenizer.token_text(number): _finite(value) for number, value in token.logprobs.top}
            for token in scored
        ],
        [start + token.offset for token in scored],
    )


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's stand-in for "very unlikely"; JSON has no infinity


def chat_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    job = run.job
    choices = [
        ChatChoice(
            answer.index,
            _message(answer),
            None
            if job.wanted.sampling.logprobs is None
            else chat_logprobs(answer.scored, job.model.tokenizer),
            answer.finish_reason,
        )
        for answer in answers
    ]
    return _to_json(
        ChatCompletion(job.id, job.created_unix_s, run.model_name, choices, usage_of(run))
    )


def _message(answer: ChoiceDelta) -> AssistantMessage:
    if not answer.calls:
        return AssistantMessage(answer.text)
    calls = [MessageToolCall(c.id, CalledFunction(c.name, c.arguments)) for c in answer.calls]
    return AssistantMessage(answer.text or None, tool_calls=calls)


def completion_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    job = run.job
    choices = []
    for answer in answers:
        echo = _echo(job, answer.index)
        logprobs = (
            None
            if job.wanted.sampling.logprobs is None
            else completion_logprobs(answer.scored, job.model.tokenizer, len(echo))
        )
        choices.append(
            CompletionChoice(answer.index, echo + answer.text, logprobs, answer.finish_reason)
        )
    return _to_json(Completion(job.id, job.created_unix_s, run.model_name, choices, usage_of(run)))


class Frames(ABC):
    """Events of a streamed answer; all that does not change in a request is built once."""

    kind: ClassVar[str]
    gain: ClassVar[bytes]  # the key under which a choice's new text stands

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer = job.model.tokenizer
        self._preambles = [self._preamble(job.model.name)] * len(job.requests)
        self._tail = b',"usage":null}\n\n' if job.wanted.include_usage else b"}\n\n"

    def name_models(self, run: RunningJob) -> bool:
        """Name the models that the cascade chose so far. Returns whether it chose for all."""
        names = [None if each is None else each.model for each in run.decisions]
        for index, name in enumerate(names):
            if name is not None:
                self._preambles[index] = self._preamble(name)
        return None not in names

    def _preamble(self, model_name: str) -> bytes:
        job = self._job
        return (
            b'data: {"id":' + _to_json(job.id) + b',"object":' + _to_json(self.kind)
            + b',"created":%d' % job.created_unix_s
            + b',"model":' + _to_json(model_name) + b',"choices":['
        )  # fmt: skip

    @abstractmethod
    def opening(self) -> bytes:
        """What comes before the first token of each choice."""

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The text of `piece`, then, as an event of its own, its end."""
        events = b""
        if piece.text or piece.scored:
            logprobs = self._logprobs(piece) if piece.scored else b"null"
            events = self._event(piece.index, self._text(piece.text), logprobs, b"null")
        if piece.calls:
            events += self._event(piece.index, _called(piece.calls), b"null", b"null")
        if piece.finish_reason is not None:
            reason = _to_json(piece.finish_reason)
            events += self._event(piece.index, self._text(""), b"null", reason)
        return events

    def closing(self, run: RunningJob) -> bytes:
        """The usage chunk when it was asked for, and `[DONE]`."""
        if not self._job.wanted.include_usage:
            return DONE
        preamble = self._preamble(run.model_name)
        return preamble + b'],"usage":' + _to_json(usage_of(run)) + b"}\n\n" + DONE

    @abstractmethod
    def _text(self, text: str) -> bytes:
        """New text as the value of `gain`."""

    @abstractmethod
    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        """Log-probabilities of the piece's tokens."""

    def _event(self, index: int, gain: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b"".join(
            (
                self._preambles[index],
                b'{"index":%d,' % index,
                self.gain,
                gain,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                reason,
                b"}]",
                self._tail,
            )
        )


class ChatFrames(Frames):
    kind = "chat.completion.chunk"
    gain = b'"delta":'

    def opening(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        events = (self._event(i, delta, b"null", b"null") for i in range(len(self._job.requests)))
        return b"".join(events)

    def _text(self, text: str) -> bytes:
        return b'{"content":' + _to_json(text) + b"}"

    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        return _to_json(chat_logprobs(piece.scored, self._tokenizer))


class CompletionFrames(Frames):
    kind = "text_completion"
    gain = b'"text":'

    def opening(self) -> bytes:
        if not self._job.echoes:
            return b""
        indices = range(len(self._job.requests))
        events = (
            self._event(index, self._text(_echo(self._job, index)), b"null", b"null")
            for index in indices
        )
        return b"".join(events)

    def _text(self, text: str) -> bytes:
        return _to_json(text)

    def _logprobs(self, piece: ChoiceDelta) -> bytes:
        start = len(_echo(self._job, piece.index))
        return _to_json(completion_logprobs(piece.scored, self._tokenizer, start))


def _called(calls: Sequence[Call]) -> bytes:
    """The delta of a chat's choice that calls functions; each call comes whole."""
    deltas = [ToolCallDelta(c.number, c.id, CalledFunction(c.name, c.arguments)) for c in calls]
    return b'{"tool_calls":' + _to_json(deltas) + b"}"


def error_frame(error: DisaggError) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"


def _echo(job: Job, index: int) -> str:
    return job.echoes[index // job.wanted.num_choices] if job.echoes else ""
