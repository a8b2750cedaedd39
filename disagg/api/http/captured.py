"""Prompts and answers as attributes of spans, in the JSON of OpenTelemetry's GenAI conventions.

Only for servers that were told to capture them (`telemetry.captures_content`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from disagg import semconv
from disagg.api.apis import Frames
from disagg.api.request_spec import Conversation, Prompt, Text
from disagg.api.running_job import ChoiceDelta
from disagg.text.answer_delta import join_calls

Part = dict[str, Any]


def input_messages(prompts: Sequence[Prompt]) -> str:
    """The messages of conversations; other prompts are messages of the user."""
    messages: list[dict[str, Any]] = []
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            messages += ({"role": each["role"], "parts": _parts(each)} for each in prompt.messages)
        elif isinstance(prompt, Text):
            messages.append({"role": "user", "parts": [_text(prompt.text)]})
        else:
            messages.append({"role": "user", "parts": [{"type": "token_ids", "content": prompt}]})
    return msgspec.json.encode(messages).decode()


def output_messages(answers: Iterable[ChoiceDelta]) -> str:
    """One message for each choice, also if it is not complete."""
    messages = []
    for answer in answers:
        calls = (_call(call.id, call.name, call.arguments) for call in join_calls(answer.calls))
        parts = [*_texts(answer.reasoning, answer.text), *calls]
        reason = answer.finish_reason or semconv.UNFINISHED
        messages.append({"role": "assistant", "parts": parts, "finish_reason": reason})
    return msgspec.json.encode(messages).decode()


class CapturedFrames:
    """Passes events on, and adds their pieces to `answers`."""

    def __init__(self, frames: Frames, answers: Sequence[ChoiceDelta]) -> None:
        self._frames = frames
        self._answers = answers
        self.name_models = frames.name_models
        self.opening = frames.opening
        self.closing = frames.closing
        self.error = frames.error

    def piece(self, piece: ChoiceDelta) -> bytes:
        self._answers[piece.index].extend(piece)
        return self._frames.piece(piece)


def _parts(message: Mapping[str, Any]) -> list[Part]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        answered = message.get("tool_call_id")
        return [{"type": "tool_call_response", "id": answered, "response": content}]
    calls = (
        _call(call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return [*_texts(message.get("reasoning_content") or "", content), *calls]


def _texts(reasoning: str, text: str) -> list[Part]:
    parts = [{"type": "reasoning", "content": reasoning}] if reasoning else []
    return [*parts, _text(text)] if text else parts


def _text(text: str) -> Part:
    return {"type": "text", "content": text}


def _call(call_id: str | None, name: str, arguments: str) -> Part:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": str(arguments)}
