"""The served APIs, with the functions that read requests and write answers; and `/openapi.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import msgspec

from disagg.api import anthropic, responses
from disagg.api.openai import answers, pooling
from disagg.api.openai.fields import ChatRequest, CompletionRequest
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
        request: the body of its requests.
        id_prefix: prefix of the ids of its responses.
        read: parses a body and checks its fields, types and sizes. The request has at least the
            field `model`, a text or None. Raises `InvalidRequest`.
        understand: converts a request for a model to a `RequestSpec`. Raises `InvalidRequest`.
        frames: makes the events of a streamed response; None: there are none.
        body: makes the body of a response that is not streamed, from the answers that were kept.
        error_body: makes the body of an error response.
        operation: what OpenTelemetry calls it.
    """

    request: type[msgspec.Struct]
    id_prefix: str
    read: Callable[[bytes], Any]
    understand: Callable[[Any, ServedModel], RequestSpec]
    frames: Callable[[RunningJob], Frames] | None
    body: Callable[[RunningJob], bytes]
    error_body: Callable[[DisaggError], bytes] = error_json
    operation: str = "chat"


CHAT = Api(
    ChatRequest,
    "chatcmpl-",
    partial(read_request, kind=ChatRequest),
    understand_chat,
    answers.ChatFrames,
    answers.chat_body,
)
COMPLETIONS = Api(
    CompletionRequest,
    "cmpl-",
    partial(read_request, kind=CompletionRequest),
    understand_completion,
    answers.CompletionFrames,
    answers.completion_body,
    operation="text_completion",
)
RESPONSES = Api(
    responses.ResponsesRequest,
    "resp_",
    responses.read_response_request,
    responses.understand_response_request,
    responses.ResponseFrames,
    responses.response_body,
)
MESSAGES = Api(
    anthropic.MessagesRequest,
    "msg_",
    partial(anthropic.read_messages, kind=anthropic.MessagesRequest),
    anthropic.understand_messages,
    anthropic.MessageFrames,
    anthropic.message_body,
    anthropic.error_body,
)


def _of_prompts(
    operation: str,
    id_prefix: str,
    kind: Any,
    understand: Callable[[Any, ServedModel], RequestSpec],
    body: Callable[[RunningJob], bytes],
) -> Api:
    """An API whose responses have no answers, so that nothing is streamed."""
    read = partial(read_request, kind=kind)
    return Api(kind, id_prefix, read, understand, None, body, operation=operation)


EMBEDDINGS = _of_prompts(
    "embeddings",
    "embd-",
    pooling.EmbeddingsRequest,
    pooling.understand_embeddings,
    pooling.embeddings_body,
)
SCORE = _of_prompts(
    "score", "score-", pooling.ScoreRequest, pooling.understand_score, pooling.score_body
)
RERANK = _of_prompts(
    "rerank", "rerank-", pooling.RerankRequest, pooling.understand_rerank, pooling.rerank_body
)

BY_PATH: Mapping[str, Api] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
    **dict.fromkeys(("/v1/score", "/score"), SCORE),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RERANK),
}


def error_body(error: DisaggError, path: str) -> bytes:
    """The body of an error response on this path."""
    if path.startswith("/v1/messages"):
        return MESSAGES.error_body(error)
    return BY_PATH[path].error_body(error) if path in BY_PATH else error_json(error)


Method: TypeAlias = Literal["GET", "POST", "DELETE"]
Who: TypeAlias = Literal["everybody", "tenants", "operator"]
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[seconds]": {"type": "integer"},
    },
}


@dataclass(frozen=True)
class HttpRoute:
    """One path of the HTTP API.

    Attributes:
        path: where it ends with a name in braces, requests have any text there.
        endpoint: answers requests.
        methods: for each, the struct of its JSON body, or None if it has none.
        who: who may call it.
        is_shown: whether it is in `/openapi.json`.
    """

    path: str
    endpoint: Callable[..., Any]
    methods: Mapping[Method, type[msgspec.Struct] | None]
    who: Who = "tenants"
    is_shown: bool = True


def openapi(routes: Iterable[HttpRoute]) -> bytes:
    """The JSON of `/openapi.json`: a description of all requests in OpenAPI 3.1.

    It is generated from the structs that parse requests, so it has exactly the types, limits and
    required fields that the server checks.
    """
    shown = [route for route in routes if route.is_shown]
    kinds = [body for route in shown for body in route.methods.values() if body is not None]
    (*bodies, error), components = msgspec.json.schema_components(
        [*kinds, ErrorReply], ref_template="#/components/schemas/{name}"
    )
    schemas: dict[type | None, Any] = dict(zip(kinds, bodies, strict=True))
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    paths = {
        route.path: {
            method.lower(): _operation(route.path, method, schemas.get(body), error)
            for method, body in route.methods.items()
        }
        for route in shown
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "disagg", "version": version("disagg")},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": keys},
            "security": [{"bearer": []}, {"x-api-key": []}, {}],
        }
    )


def _operation(path: str, method: Method, body: Any, error: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in BY_PATH and BY_PATH[path].frames is not None:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer", "content": answers},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": error}},
            },
        }
    }
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    elif (path, method) == ("/v1/files", "POST"):
        content = {"multipart/form-data": {"schema": _FORM}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
