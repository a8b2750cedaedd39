"""`/openapi.json`: a description of all requests in OpenAPI 3.1.

It is generated from the structs that parse requests, so it has exactly the types, limits and
required fields that the server checks.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from disagg.api.anthropic.requests import CountTokensRequest, MessagesRequest
from disagg.api.apis import BY_PATH
from disagg.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from disagg.api.refusals import ErrorReply
from disagg.api.responses.requests import ResponsesRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PATHS = (*BODIES, "/v1/models", "/v1/models/{name}", "/health", "/ready", "/live", "/version")


@cache
def document() -> bytes:
    """The whole document, as JSON."""
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
