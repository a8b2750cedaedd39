"""The lines of OpenAI's batch format: reads requests, writes answers and errors.

A line of the input is `{"custom_id", "method": "POST", "url", "body"}`. A line of the output has
the same `custom_id` and a `response` with `status_code`, `request_id` and `body`. A line that has
no response has an `error` with `code` and `message` instead.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from disagg.errors import InvalidRequest

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class BatchReply(NamedTuple):
    """The reply to a request, by HTTP or without."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch. `body` is JSON that is not looked into."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Streamed(msgspec.Struct):
    stream: Any = None


class _WithName(msgspec.Struct):
    custom_id: Any = None


_read_line = msgspec.json.Decoder(BatchLine).decode
_read_streamed = msgspec.json.Decoder(_Streamed).decode
_read_name = msgspec.json.Decoder(_WithName).decode


def read_line(raw: bytes, number: int, only: str | None = None) -> BatchLine:
    """The request in line `number` of a file.

    Args:
        only: the path that all requests must name; None: any of `PATHS`.

    Raises:
        InvalidRequest: it is none; the message names the line.
    """
    try:
        line = _read_line(raw)
        streamed = _read_streamed(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        code = "invalid_json_line" if isinstance(error, UnicodeDecodeError) else "invalid_line"
        raise InvalidRequest(
            f'Line {number} is not a request of a batch, such as {{"custom_id": "1", "method":'
            f' "POST", "url": "{PATHS[0]}", "body": {{...}}}}: {error}.',
            code=code,
        ) from None
    if line.method != "POST":
        raise _wrong(number, "method", f"it must be POST, not {line.method[:16]!r}")
    paths = PATHS if only is None else (only,)
    if line.url not in paths:
        raise _wrong(number, "url", f"it must be {' or '.join(paths)}, not {line.url[:64]!r}")
    if streamed.stream:
        raise _wrong(number, "body.stream", "answers of batches are not streamed; leave it out")
    return line


def name_of(raw: bytes) -> str | None:
    """The `custom_id` in a line of any kind, if it has one."""
    try:
        name = _read_name(raw).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return name if isinstance(name, str) else None


def _wrong(number: int, param: str, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"Line {number}: invalid {param}: {message}.", code="invalid_value", param=param
    )


def answer_line(custom_id: str, reply: BatchReply) -> bytes:
    """The line of a request that got a reply. What is not JSON becomes a JSON text."""
    try:
        msgspec.json.decode(reply.body, type=msgspec.Raw)
        body = msgspec.Raw(b"".join(reply.body.splitlines()))  # a line has no line breaks
    except msgspec.DecodeError:
        body = msgspec.Raw(msgspec.json.encode(reply.body[:4096].decode(errors="replace")))
    request_id = reply.headers.get("x-request-id", "")
    response = {"status_code": reply.status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def error_line(custom_id: str | None, code: str, message: str) -> bytes:
    """The line of a request that was not sent."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id}
    return msgspec.json.encode(line | {"response": response, "error": error}) + b"\n"
