"""The table of served APIs: for each, the functions that read requests and write answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from disagg.api.anthropic import answers as messages
from disagg.api.anthropic.requests import read_messages, understand_messages
from disagg.api.openai import answers
from disagg.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    read_request,
    understand_chat,
    understand_completion,
)
from disagg.api.refusals import error_json
from disagg.api.request_spec import RequestSpec
from disagg.api.responses import answers as response_items
from disagg.api.responses.requests import read_response_request, understand_response_request
from disagg.api.running_job import ChoiceDelta, Job, RunningJob
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError


class Frames(Protocol):
    """The events of one streamed answer."""

    def name_models(self, run: RunningJob) -> bool:
        """Name the models that the cascade chose so far. Returns whether it chose for all."""
        ...

    def opening(self) -> bytes:
        """The events before the first token of each choice."""
        ...

    def piece(self, piece: ChoiceDelta) -> bytes:
        """The events for new tokens of a choice."""
        ...

    def closing(self, run: RunningJob) -> bytes:
        """The events after the last token."""
        ...

    def error(self, error: DisaggError) -> bytes:
        """The last event of a stream that fails."""
        ...


class Request(Protocol):
    """The fields that the requests of all APIs have."""

    @property
    def model(self) -> str | None: ...


ApiRequest = TypeVar("ApiRequest", bound=Request)


@dataclass(frozen=True)
class Api(Generic[ApiRequest]):
    """The functions of one API.

    Attributes:
        id_prefix: prefix of the ids of its responses.
        read: parses a body and checks its fields, types and sizes. Raises `InvalidRequest`.
        understand: converts a request for a model to a `RequestSpec`; the integer is the lowest
            priority number that the client may set. Raises `InvalidRequest`.
        frames: makes the events of a streamed response.
        body: makes the body of a response that is not streamed.
        error_body: makes the body of an error response.
        operation: what OpenTelemetry calls it.
    """

    id_prefix: str
    read: Callable[[bytes], ApiRequest]
    understand: Callable[[ApiRequest, ServedModel, int], RequestSpec]
    frames: Callable[[Job], Frames]
    body: Callable[[RunningJob, Sequence[ChoiceDelta]], bytes]
    error_body: Callable[[DisaggError], bytes] = error_json
    operation: str = "chat"


CHAT = Api(
    "chatcmpl-",
    partial(read_request, kind=ChatRequest),
    understand_chat,
    answers.ChatFrames,
    answers.chat_body,
)
COMPLETIONS = Api(
    "cmpl-",
    partial(read_request, kind=CompletionRequest),
    understand_completion,
    answers.CompletionFrames,
    answers.completion_body,
    operation="text_completion",
)
RESPONSES = Api(
    "resp_",
    read_response_request,
    understand_response_request,
    response_items.ResponseFrames,
    response_items.response_body,
)
MESSAGES = Api(
    "msg_",
    read_messages,
    understand_messages,
    messages.MessageFrames,
    messages.message_body,
    messages.error_body,
)

BY_PATH: Mapping[str, Api[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


def error_body(error: DisaggError, path: str) -> bytes:
    """The body of an error response on this path."""
    if path.startswith("/v1/messages"):
        return MESSAGES.error_body(error)
    return BY_PATH[path].error_body(error) if path in BY_PATH else error_json(error)
