"""The table of served APIs: for each, the functions that read requests and write answers.

Also `/openapi.json`, which describes their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import msgspec

from disagg.api import anthropic, responses
from disagg.api.openai import answers
from disagg.api.openai.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from disagg.api.openai.requests import read_request, understand_chat, understand_completion
from disagg.api.refusals import ErrorReply, error_json
from disagg.api.request_spec import RequestSpec
from disagg.api.running_job import Frames, RunningJob
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError


@dataclass(frozen=True)
class Api:
    """The functions of one API.

    Attributes:
        id_prefix: prefix of the ids of its responses.
        read: parses a body and checks its fields, types and sizes. The request has at least the
            field `model`, a text or None. Raises `InvalidRequest`.
        understand: converts a request for a model to a `RequestSpec`; the integer is the lowest
            priority number that the client may set. Raises `InvalidRequest`.
        frames: makes the events of a streamed response.
        body: makes the body of a response that is not streamed, from the answers that were kept.
        error_body: makes the body of an error response.
        operation: what OpenTelemetry calls it.
    """

    id_prefix: str
    read: Callable[[bytes], Any]
    understand: Callable[[Any, ServedModel, int], RequestSpec]
    frames: Callable[[RunningJob], Frames]
    body: Callable[[RunningJob], bytes]
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
    responses.read_response_request,
    responses.understand_response_request,
    responses.ResponseFrames,
    responses.response_body,
)
MESSAGES = Api(
    "msg_",
    anthropic.read_messages,
    anthropic.understand_messages,
    anthropic.MessageFrames,
    anthropic.message_body,
    anthropic.error_body,
)

BY_PATH: Mapping[str, Api] = {
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


BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": responses.ResponsesRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.CountTokensRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PATHS = (*BODIES, "/v1/models", "/v1/models/{name}", "/health", "/ready", "/live", "/version")


@cache
def openapi() -> bytes:
    """The JSON of `/openapi.json`: a description of all requests in OpenAPI 3.1.

    It is generated from the structs that parse requests, so it has exactly the types, limits and
    required fields that the server checks.
    """
    kinds = [*BODIES.values(), ErrorReply]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    error = schemas[-1]
    bodies = dict(zip(BODIES, schemas, strict=False))
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "disagg", "version": version("disagg")},
            "paths": {path: _operation(path, bodies.get(path), error) for path in PATHS},
            "components": {"schemas": components, "securitySchemes": keys},
            "security": [{"bearer": []}, {"x-api-key": []}, {}],
        }
    )


def _operation(path: str, body: Any, error: Any) -> dict[str, Any]:
    answers = {"application/json": {"schema": {"type": "object"}}}
    if path in BY_PATH:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {
        "200": {"description": "The answer", "content": answers},
        "default": {
            "description": "An error",
            "content": {"application/json": {"schema": error}},
        },
    }
    if body is None:
        in_path = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        parameters = {"parameters": in_path} if "{name}" in path else {}
        return {"get": parameters | {"responses": responses}}
    request = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": {"requestBody": request, "responses": responses}}
