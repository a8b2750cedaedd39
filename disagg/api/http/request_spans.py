"""The spans of one HTTP request: the server's, and beneath it the one of the model's answer.

    POST /v1/chat/completions
    └── chat MODEL                  parent of what ingress and workers do for the answer

All attributes of requests are made here. Prompts and answers are among them only if the server
was told to capture them (`telemetry.captures_content`), in the JSON of OpenTelemetry's GenAI
conventions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from disagg import semconv, telemetry
from disagg.api.request_spec import Conversation, Prompt, RequestSpec, Text
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.errors import DisaggError
from disagg.text.answer_delta import join_calls

TENANT_HASH_NBYTES = 8


class RequestSpans:
    """Starts and ends the spans of one request. While tracing is off, they are no spans."""

    def __init__(self) -> None:
        self._server = self._inference = telemetry.NO_SPAN
        self._run: RunningJob | None = None

    def open(
        self,
        method: str,
        route: str,
        traceparent: str,
        attributes: Callable[[], dict[str, telemetry.Value]],
    ) -> str:
        """Start the server's span. Returns its traceparent."""
        name = f"{'HTTP' if method == semconv.OTHER else method} {route}".rstrip()
        of_head = attributes() if telemetry.enabled() else None
        self._server = telemetry.span(name, traceparent, of_head, "server")
        return self._server.traceparent

    def begin(self, operation: str, answer_id: str, tenant: str, spec: RequestSpec) -> str:
        """Start the span of the answer that `spec` asks for. Returns its traceparent."""
        attributes = None
        if telemetry.enabled():
            attributes = _of_inference(operation, answer_id, spec) | {"disagg.tenant": tenant}
            if telemetry.captures_content():
                attributes[semconv.GEN_AI_INPUT_MESSAGES] = input_messages(spec.prompts)
        name = f"{operation} {spec.model.name}"
        self._inference = telemetry.span(name, self._server.traceparent, attributes)
        return self._inference.traceparent

    def follow(self, run: RunningJob) -> None:
        """Take the counts of `run` when the spans end, and its answers if they are captured."""
        self._run = run

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels that lead from a metric to the span of the answer; None if it is not kept."""
        parsed = telemetry.parse_traceparent(self._inference.traceparent)
        if not telemetry.enabled() or parsed is None or not parsed.sampled:
            return None
        return {"trace_id": f"{parsed.trace_id:032x}", "span_id": f"{parsed.span_id:016x}"}

    def fail(self, error: DisaggError) -> None:
        """The request is refused or fails. Does not keep `error`, whose traceback has the body."""
        self._inference.fail(error)
        if error.http_status >= 500:  # the others are the client's errors, not the server's
            self._server.fail(error)
        else:
            self._server.set(semconv.ERROR_TYPE, telemetry.error_type(error))

    def abandon(self) -> None:
        """The client leaves before the end of the answer."""
        self._inference.set(telemetry.CANCELLED, True)

    def close(self, status: int | None) -> None:
        """End the spans. `status` is None if no reply began and the client did not leave."""
        if self._run is not None and telemetry.enabled():
            self._inference.set_all(_of_answer(self._run))
            if telemetry.captures_content():
                shown = output_messages(self._run.kept)
                self._inference.set(semconv.GEN_AI_OUTPUT_MESSAGES, shown)
        if status is not None:
            self._server.set(semconv.HTTP_RESPONSE_STATUS_CODE, status)
        self._inference.end()
        self._server.end()


def shown_tenant(tenant: str, tenant_class: Callable[[str], str]) -> str:
    """The tenant's name if it is configured, else a hash: names may say who a person is."""
    known = tenant_class(tenant)
    if not tenant or known == tenant:
        return known
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_HASH_NBYTES).hexdigest()


def _of_inference(operation: str, answer_id: str, spec: RequestSpec) -> dict[str, telemetry.Value]:
    sampling = spec.sampling
    attributes: dict[str, telemetry.Value | None] = {
        semconv.GEN_AI_OPERATION_NAME: operation,
        semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
        semconv.GEN_AI_REQUEST_MODEL: spec.model.name,
        semconv.GEN_AI_RESPONSE_ID: answer_id,
        semconv.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        semconv.GEN_AI_REQUEST_MAX_TOKENS: spec.max_tokens,
        semconv.GEN_AI_REQUEST_SEED: spec.seed,
        semconv.GEN_AI_REQUEST_TOP_K: sampling.top_k or None,
        semconv.GEN_AI_REQUEST_STOP_SEQUENCES: spec.stops or None,
        semconv.GEN_AI_REQUEST_STREAM: spec.stream or None,
        semconv.GEN_AI_REQUEST_CHOICE_COUNT: spec.num_choices if spec.num_choices > 1 else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _of_answer(run: RunningJob) -> dict[str, telemetry.Value]:
    attributes: dict[str, telemetry.Value] = {
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [
            reason or semconv.UNFINISHED for reason in run.finish_reasons
        ],
        semconv.GEN_AI_USAGE_INPUT_TOKENS: run.num_prompt_tokens,
        semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: run.num_cached_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: run.num_completion_tokens,
        semconv.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: run.num_reasoning_tokens,
    }
    if run.num_completion_tokens:
        attributes[semconv.GEN_AI_RESPONSE_MODEL] = run.model_name
    return attributes


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


def _parts(message: Mapping[str, Any]) -> list[Part]:
    content = message.get("content") or ""
    if isinstance(content, list):  # of an image nothing is kept
        return [_text(part["text"]) if "text" in part else part for part in content]
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
