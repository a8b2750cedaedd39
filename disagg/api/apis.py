"""The served APIs: their requests, and the functions that answer; and `/openapi.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import msgspec

from disagg.api import anthropic, responses
from disagg.api.json_body import Body
from disagg.api.openai import answers, pooling
from disagg.api.openai.fields import ChatRequest, CompletionRequest
from disagg.api.openai.requests import understand_chat, understand_completion
from disagg.api.refusals import ErrorReply, error_json
from disagg.api.request_spec import RequestSpec
from disagg.api.running_job import Frames, RunningJob
from disagg.api.served_model import ServedModel
from disagg.errors import DisaggError


@dataclass(frozen=True)
class Api:
    """The functions of one API.

    Attributes:
        request: the body of its requests, which has at least the field `model`, a text or None.
        id_prefix: prefix of the ids of its responses.
        understand: converts a request for a model to a `RequestSpec`. Raises `InvalidRequest`.
        body: makes the body of a response that is not streamed, from the answers that were kept.
        frames: makes the events of a streamed response; None: there are none.
        error_body: makes the body of an error response.
        operation: what OpenTelemetry calls it.
    """

    request: type[Body]
    id_prefix: str
    understand: Callable[[Any, ServedModel], RequestSpec]
    body: Callable[[RunningJob], bytes]
    frames: Callable[[RunningJob], Frames] | None = None
    error_body: Callable[[DisaggError], bytes] = error_json
    operation: str = "chat"


CHAT = Api(ChatRequest, "chatcmpl-", understand_chat, answers.chat_body, answers.ChatFrames)
COMPLETIONS = Api(
    CompletionRequest,
    "cmpl-",
    understand_completion,
    answers.completion_body,
    answers.CompletionFrames,
    operation="text_completion",
)
RESPONSES = Api(
    responses.ResponsesRequest,
    "resp_",
    responses.understand_response_request,
    responses.response_body,
    responses.ResponseFrames,
)
MESSAGES = Api(
    anthropic.MessagesRequest,
    "msg_",
    anthropic.understand_messages,
    anthropic.message_body,
    anthropic.MessageFrames,
    anthropic.error_body,
)
EMBEDDINGS = Api(
    pooling.EmbeddingsRequest,
    "embd-",
    pooling.understand_embeddings,
    pooling.embeddings_body,
    operation="embeddings",
)
SCORE = Api(
    pooling.ScoreRequest,
    "score-",
    pooling.understand_score,
    pooling.score_body,
    operation="score",
)
RERANK = Api(
    pooling.RerankRequest,
    "rerank-",
    pooling.understand_rerank,
    pooling.rerank_body,
    operation="rerank",
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
