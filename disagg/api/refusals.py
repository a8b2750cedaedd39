"""Errors that only the HTTP layer raises, and functions that turn errors into replies.

These errors are never sent to another process. Clients read their messages, so they name no file,
address or class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.errors import (
    ContextLengthExceeded,
    DisaggError,
    InvalidRequest,
    Overloaded,
    RequestError,
)

MAX_RETRY_AFTER_S = 120  # OpenAI's clients do not retry at all if Retry-After is longer
_RETRYABLE_4XX = (408, 409, 429)


def missing_parameter(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: {param}.", code="missing_required_parameter", param=param
    )


def invalid_value(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid {param}: {message}", code="invalid_value", param=param)


def unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} is not supported. {message}", code="unsupported_parameter", param=param
    )


# Fields by which clients would control internal transfers, or send code or tensors.
INTERNAL_FIELDS = (
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "chat_template", "ec_transfer_params",
    "kv_transfer_params", "logits_processors", "prompt_embeds", "request_id", "rid", "vllm_xargs",
)  # fmt: skip
NOT_IMPLEMENTED = "Leave it out: this server does not implement it."
# The values, besides null, of refused fields that ask for what is done anyway. Those of fields that
# are not here are false and empty ones; but an empty object asks for a feature with its defaults.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(INTERNAL_FIELDS, ()),
    **dict.fromkeys(("audio", "prediction", "repetition_detection", "web_search_options"), ()),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "function_call": ("none", "auto"),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "normalize": (True,),
    "truncation_side": ("left",),
}


def refuse_fields(raw: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises `InvalidRequest` if a field that is refused says something; `refused` says why."""
    for name, why in refused.items():
        value = raw.get(name)
        is_harmless = value in _HARMLESS[name] if name in _HARMLESS else not value
        if value is not None and not is_harmless:
            raise unsupported(name, why)


def only_text(param: str, kind: str) -> InvalidRequest:
    """The error for images and other content of type `kind`."""
    return InvalidRequest(
        f"Invalid {param}: only text is supported, not {kind[:64]!r}.",
        code="unsupported_content",
        param=param,
    )


def too_long(message: str, max_model_len: int, param: str) -> ContextLengthExceeded:
    """The error for a request that does not fit the model's context.

    Its words are those by which client libraries recognise it, whatever the error's code: LiteLLM
    and Pydantic AI by OpenAI's sentence, LangChain and Claude Code by Anthropic's "prompt is too
    long".
    """
    return ContextLengthExceeded(
        f"{message} This model's maximum context length is {max_model_len} tokens.", param=param
    )


class UnknownUrl(RequestError):
    http_status = 404
    code = "unknown_url"


class MethodNotAllowed(RequestError):
    http_status = 405
    code = "method_not_supported"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestTimeout(RequestError):
    http_status = 408
    code = "request_timeout"


class UnsupportedMediaType(RequestError):
    http_status = 415
    code = "unsupported_media_type"


class ErrorBody(msgspec.Struct):
    """OpenAI's error object. All four keys are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


def error_json(error: DisaggError) -> bytes:
    return msgspec.json.encode(
        ErrorReply(ErrorBody(error.message, error.error_type, error.param, error.code))
    )


def error_headers(error: DisaggError) -> list[tuple[bytes, bytes]]:
    """Headers that tell a client whether and when to try again."""
    headers: list[tuple[bytes, bytes]] = []
    if error.http_status in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        seconds = min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S)
        headers.append((b"retry-after", str(seconds).encode()))
    if 400 <= error.http_status < 500 and error.http_status not in _RETRYABLE_4XX:
        headers.append((b"x-should-retry", b"false"))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return headers


def as_disagg_error(error: BaseException, request_id: str) -> DisaggError:
    """`error` itself if it is a `DisaggError`, otherwise an error that reveals no internals."""
    if isinstance(error, DisaggError):
        return error
    return DisaggError(
        f"An internal error occurred; the server's log has details under {request_id}."
    )
