"""Anthropic's `/v1/messages`: response bodies, events of streams, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from disagg.api.running_job import ChoiceDelta, Job, RunningJob
from disagg.errors import DisaggError
from disagg.text.answer_delta import join_calls

_to_json = msgspec.json.Encoder().encode

_GROWN = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    (answer,) = answers
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append(_thinking(answer.reasoning))
    if answer.text or not (answer.calls or content):
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in join_calls(answer.calls)
    ]
    return _to_json(
        _message(run.job, run.model_name, content) | _end(answer) | {"usage": _usage(run)}
    )


def _input(arguments: str) -> msgspec.Raw:
    """The arguments of a call as the model wrote them; `{}` if they are not a JSON object.

    They are not if the answer was cut off.
    """
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())


def _thinking(text: str) -> dict[str, Any]:
    """A thinking block. Its signature is empty, because the server does not check signatures."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _message(job: Job, model_name: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "model": model_name,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(answer: ChoiceDelta) -> dict[str, Any]:
    if answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    reason = answer.finish_reason or "stop"
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _usage(run: RunningJob) -> dict[str, int]:
    """The usage object. Anthropic counts cached tokens separately from input tokens."""
    num_cached = run.num_cached_tokens
    return {
        "input_tokens": run.job.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": run.num_completion_tokens,
    }


class MessageFrames:
    """Events of a streamed message: blocks, each with a start, deltas and a stop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model_name = job.model.name
        self._block = -1  # index of the open block; -1 if none has begun
        self._kind: str | int = ""  # kind of the open block: "thinking", "text" or a call's number
        self._end: dict[str, Any] = {}

    def name_models(self, run: RunningJob) -> bool:
        self._model_name = run.model_name
        return all(run.decisions)

    def opening(self) -> bytes:
        usage = {"input_tokens": self._job.num_prompt_tokens, "output_tokens": 0}
        message = _message(self._job, self._model_name, []) | {"usage": usage}
        return _event("message_start", {"message": message})

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The events for new tokens.

        Arguments of the open call come first, because a block that has ended cannot grow.
        """
        events, num_grown = [], 0
        for call in piece.calls:
            if call.number != self._kind:
                break
            events.append(self._grow_call(call.arguments))
            num_grown += 1
        if piece.reasoning:
            if self._kind != "thinking":
                events.append(self._begin("thinking", _thinking("")))
            events.append(self._grow(b"thinking_delta", b"thinking", piece.reasoning))
        if piece.text:
            if self._kind != "text":
                events.append(self._begin("text", {"type": "text", "text": ""}))
            events.append(self._grow(b"text_delta", b"text", piece.text))
        for call in piece.calls[num_grown:]:
            if self._kind != call.number:
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                events.append(self._begin(call.number, block))
            events.append(self._grow_call(call.arguments))
        if piece.finish_reason is not None:
            self._end = _end(piece)
        return b"".join(events)

    def closing(self, run: RunningJob) -> bytes:
        usage = _usage(run)
        events = b"" if self._block >= 0 else self._begin("text", {"type": "text", "text": ""})
        return b"".join(
            (
                events,
                self._end_block(),
                _event("message_delta", {"delta": self._end, "usage": usage}),
                _event("message_stop", {}),
            )
        )

    def error(self, error: DisaggError) -> bytes:
        return _event("error", _error(error))

    def _begin(self, kind: str | int, block: dict[str, Any]) -> bytes:
        ended = self._end_block()
        self._block += 1
        self._kind = kind
        begun = {"index": self._block, "content_block": block}
        return ended + _event("content_block_start", begun)

    def _grow(self, kind: bytes, key: bytes, text: str) -> bytes:
        """A delta event. It is made for each token, so it avoids dictionaries."""
        return _GROWN % (self._block, kind, key, _to_json(text))

    def _grow_call(self, arguments: str) -> bytes:
        return self._grow(b"input_json_delta", b"partial_json", arguments) if arguments else b""

    def _end_block(self) -> bytes:
        return _event("content_block_stop", {"index": self._block}) if self._block >= 0 else b""


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    data = _to_json({"type": kind} | fields)
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def error_body(error: DisaggError) -> bytes:
    return _to_json({"type": "error"} | _error(error))


def _error(error: DisaggError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    return {"error": {"type": kind, "message": error.message}}
