"""The spans of one HTTP request: the server's, and beneath it the one of the model's answer.

    POST /v1/chat/completions
    └── chat MODEL                  parent of what ingress and workers do for the answer

All attributes of requests are made here. Prompts and answers are among them only if the server
was told to capture them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from disagg import semconv, telemetry
from disagg.api.http.captured import input_messages, output_messages
from disagg.api.request_spec import RequestSpec
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.errors import DisaggError

MAX_TEXT_LEN = 128  # of texts that clients choose
TENANT_HASH_NBYTES = 8


class Head(Protocol):
    """What spans show of the head of a request."""

    method: str
    path: str
    route: str  # "" if there is no such endpoint
    headers: dict[bytes, bytes]
    traceparent: str

    @property
    def scheme(self) -> str: ...
    @property
    def http_version(self) -> str: ...
    @property
    def authority(self) -> tuple[str, int | None]: ...


class RequestSpans:
    """Starts and ends the spans of one request. While tracing is off, they are no spans."""

    def __init__(self) -> None:
        self._server = self._inference = telemetry.NO_SPAN
        self._run: RunningJob | None = None
        self._answers: Sequence[ChoiceDelta] = ()

    def open(self, head: Head) -> str:
        """Start the server's span. Returns its traceparent."""
        method = head.method if head.method in semconv.HTTP_METHODS else semconv.OTHER
        name = f"{'HTTP' if method == semconv.OTHER else method} {_route(head)}".rstrip()
        attributes = _of_http(head, method) if telemetry.enabled() else None
        self._server = telemetry.span(name, head.traceparent, attributes, "server")
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

    def runs(self, run: RunningJob, answers: Sequence[ChoiceDelta]) -> None:
        """Take the counts of `run` when the spans end, and `answers` if they are to be captured."""
        self._run = run
        self._answers = answers

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels that lead from a metric to the span of the answer; None if it is not kept."""
        parsed = telemetry.parse_traceparent(self._inference.traceparent)
        if not telemetry.enabled() or parsed is None or not parsed.sampled:
            return None
        return {"trace_id": f"{parsed.trace_id:032x}", "span_id": f"{parsed.span_id:016x}"}

    def failed(self, error: DisaggError) -> None:
        """The request is refused or fails. Does not keep `error`, whose traceback has the body."""
        self._inference.fail(error)
        if error.http_status >= 500:  # the others are the client's errors, not the server's
            self._server.fail(error)
        else:
            self._server.set(semconv.ERROR_TYPE, telemetry.error_type(error))

    def abandoned(self) -> None:
        """The client leaves before the end of the answer."""
        self._inference.set(telemetry.CANCELLED, True)

    def close(self, status: int | None) -> None:
        """End the spans. `status` is None if no reply began and the client did not leave."""
        if self._run is not None and telemetry.enabled():
            self._inference.set_all(_of_answer(self._run))
            if telemetry.captures_content():
                shown = output_messages(self._answers)
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


def _route(head: Head) -> str:
    return head.route + "{id}" if head.route.endswith("/") else head.route


def _of_http(head: Head, method: str) -> dict[str, telemetry.Value]:
    attributes: dict[str, telemetry.Value] = {
        semconv.HTTP_REQUEST_METHOD: method,
        semconv.URL_PATH: head.path[:MAX_TEXT_LEN],
        semconv.URL_SCHEME: head.scheme,
        semconv.NETWORK_PROTOCOL_VERSION: head.http_version,
    }
    address, port = head.authority
    agent = head.headers.get(b"user-agent", b"").decode("latin-1")[:MAX_TEXT_LEN]
    texts = {
        semconv.HTTP_ROUTE: _route(head),
        semconv.SERVER_ADDRESS: address,
        semconv.USER_AGENT_ORIGINAL: agent,
    }
    attributes |= {name: text for name, text in texts.items() if text}
    if port is not None:
        attributes[semconv.SERVER_PORT] = port
    return attributes


def _of_inference(operation: str, answer_id: str, spec: RequestSpec) -> dict[str, telemetry.Value]:
    sampling = spec.sampling
    attributes: dict[str, telemetry.Value] = {
        semconv.GEN_AI_OPERATION_NAME: operation,
        semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
        semconv.GEN_AI_REQUEST_MODEL: spec.model.name,
        semconv.GEN_AI_RESPONSE_ID: answer_id,
        semconv.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    if spec.max_tokens is not None:
        attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] = spec.max_tokens
    if spec.seed is not None:
        attributes[semconv.GEN_AI_REQUEST_SEED] = spec.seed
    if sampling.top_k:
        attributes[semconv.GEN_AI_REQUEST_TOP_K] = sampling.top_k
    if spec.stops:
        attributes[semconv.GEN_AI_REQUEST_STOP_SEQUENCES] = spec.stops
    if spec.stream:
        attributes[semconv.GEN_AI_REQUEST_STREAM] = True
    if spec.num_choices != 1:
        attributes[semconv.GEN_AI_REQUEST_CHOICE_COUNT] = spec.num_choices
    return attributes


def _of_answer(run: RunningJob) -> dict[str, telemetry.Value]:
    attributes: dict[str, telemetry.Value] = {
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [
            reason or semconv.UNFINISHED for reason in run.finish_reasons
        ],
        semconv.GEN_AI_USAGE_INPUT_TOKENS: run.job.num_prompt_tokens,
        semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: run.num_cached_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: run.num_completion_tokens,
        semconv.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: run.num_reasoning_tokens,
    }
    if run.num_completion_tokens:
        attributes[semconv.GEN_AI_RESPONSE_MODEL] = run.model_name
    return attributes
