"""OpenAI's `/v1/responses`: response bodies and the events of streams.

A response is a list of items: reasoning, messages with text, and one item per function call. In a
stream every event has a number, and each item is complete before the next one is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from disagg.api.responses.requests import ResponsesRequest
from disagg.api.running_job import ChoiceDelta, Job, RunningJob
from disagg.errors import DisaggError
from disagg.text.answer_delta import CallDelta, join_calls

_to_json = msgspec.json.Encoder().encode

_GROWN = (
    b"event: response.%b.delta\n"
    b'data: {"type":"response.%b.delta","sequence_number":%d,"delta":%b,%b}\n\n'
)


def response_body(run: RunningJob, answers: Sequence[ChoiceDelta]) -> bytes:
    (answer,) = answers
    items = []
    if answer.reasoning:
        items.append(_reasoning(run.job, 0, answer.reasoning, "completed"))
    if answer.text or not (answer.calls or items):
        items.append(_message(run.job, len(items), answer.text, "completed"))
    items += [_call(call, "completed") for call in join_calls(answer.calls)]
    items[-1]["status"] = _status(answer)  # only the last item can be cut off
    return _to_json(_response(run.job, run.model_name, answer, items) | {"usage": _usage(run)})


def _status(answer: ChoiceDelta) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _response(
    job: Job, model_name: str, answer: ChoiceDelta | None, items: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The response object. `answer` is None at the start of a stream."""
    request, sampling = job.spec.repeated, job.spec.sampling
    assert isinstance(request, ResponsesRequest)
    status = "in_progress" if answer is None else _status(answer)
    is_cut = status == "incomplete"
    text = request.text.format if request.text is not None else None
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created_unix_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model_name,
        "output": items,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if text is None else text},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": sampling.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def _reasoning(job: Job, index: int, text: str, status: str) -> dict[str, Any]:
    """A reasoning item. `index` is its position in the response."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "id": _item_id("rs_", job, index),
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": content,
    }


def _message(job: Job, index: int, text: str | None, status: str) -> dict[str, Any]:
    """A message item. `index` is its position; `text` is None if it has no part yet."""
    content = [] if text is None else [_part(text)]
    return {
        "id": _item_id("msg_", job, index),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def _item_id(prefix: str, job: Job, index: int) -> str:
    """A unique id of an item. A stream may have several messages, with calls between them."""
    return f"{prefix}{job.id.removeprefix('resp_')}_{index}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: CallDelta, status: str) -> dict[str, Any]:
    return {
        "id": "fc_" + call.id.removeprefix("call_"),
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(run: RunningJob) -> dict[str, Any]:
    num_prompt, num_output = run.job.num_prompt_tokens, run.num_completion_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": run.num_cached_tokens},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
        "total_tokens": num_prompt + num_output,
    }


class ResponseFrames:
    """Events of a streamed response."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model_name = job.model.name
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # complete items
        self._kind: Literal["", "reasoning", "message", "call"] = ""  # kind of the open item
        self._place: dict[str, Any] = {}  # event fields that locate the open item
        self._place_json = b""  # the same as JSON, without braces
        self._call = CallDelta(-1)  # the call that began last
        self._parts: list[str] = []  # pieces of the open item's text or arguments
        self._answer = ChoiceDelta(0)  # the last piece of the answer

    def name_models(self, run: RunningJob) -> bool:
        self._model_name = run.model_name
        return all(run.decisions)

    def opening(self) -> bytes:
        response = _response(self._job, self._model_name, None, [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The events for new tokens.

        Arguments of the open call come first, because a complete item cannot grow.
        """
        self._answer = piece
        events, num_grown = [], 0
        for call in piece.calls:
            if self._kind != "call" or call.number != self._call.number:
                break
            if call.arguments:
                events.append(self._grow(b"function_call_arguments", call.arguments))
            num_grown += 1
        if piece.reasoning:
            if self._kind != "reasoning":
                events.append(self._begin("reasoning"))
            events.append(self._grow(b"reasoning_text", piece.reasoning))
        if piece.text:
            if self._kind != "message":
                events.append(self._begin("message"))
            events.append(self._grow(b"output_text", piece.text))
        for call in piece.calls[num_grown:]:
            if call.number != self._call.number:
                events.append(self._end_item())
                self._call = replace(call, arguments="")
            events.append(self._begin("call"))
            if call.arguments:
                events.append(self._grow(b"function_call_arguments", call.arguments))
        return b"".join(events)

    def closing(self, run: RunningJob) -> bytes:
        is_empty = not self._kind and not self._items
        events = [self._begin("message")] if is_empty else []
        events.append(self._end_item(_status(self._answer)))
        response = _response(self._job, run.model_name, self._answer, self._items)
        response["usage"] = _usage(run)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def error(self, error: DisaggError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _begin(self, kind: Literal["reasoning", "message", "call"]) -> bytes:
        """Begin an item of this kind, unless one is open already."""
        if self._kind == kind:
            return b""
        ended = self._end_item()
        self._kind = kind
        item = self._item("in_progress")
        self._place = {"output_index": len(self._items), "item_id": item["id"]}
        if kind != "call":
            self._place["content_index"] = 0
        if kind == "message":
            self._place["logprobs"] = []
        self._place_json = _to_json(self._place)[1:-1]
        added = self._item_event("added", item)
        part = self._part_event("added", "") if kind == "message" else b""
        return ended + added + part

    def _grow(self, kind: bytes, text: str) -> bytes:
        """A delta event. It is made for each token, so it avoids dictionaries."""
        self._parts.append(text)
        number = self._num_events
        self._num_events += 1
        return _GROWN % (kind, kind, number, _to_json(text), self._place_json)

    def _end_item(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
        text = "".join(self._parts)
        match self._kind:
            case "":
                return b""
            case "reasoning":
                done = self._event("response.reasoning_text.done", text=text, **self._place)
            case "message":
                done = self._event("response.output_text.done", text=text, **self._place)
                done += self._part_event("done", text)
            case "call":
                kind, name = "response.function_call_arguments.done", self._call.name
                done = self._event(kind, name=name, arguments=text, **self._place)
        item = self._item(status)
        done += self._item_event("done", item)
        self._items.append(item)
        self._kind = ""
        self._parts.clear()
        return done

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it is now."""
        text = "".join(self._parts)
        if self._kind == "reasoning":
            return _reasoning(self._job, len(self._items), text, status)
        if self._kind == "call":
            return _call(replace(self._call, arguments=text), status)
        shown = None if status == "in_progress" else text
        return _message(self._job, len(self._items), shown, status)

    def _item_event(self, change: str, item: dict[str, Any]) -> bytes:
        place = {"output_index": len(self._items), "item": item}
        return self._event(f"response.output_item.{change}", **place)

    def _part_event(self, change: str, text: str) -> bytes:
        return self._event(f"response.content_part.{change}", part=_part(text), **self._place)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _to_json({"type": kind, "sequence_number": self._num_events} | fields)
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
