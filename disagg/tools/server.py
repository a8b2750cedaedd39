"""A client of servers with OpenAI's API, for commands: where they are, and what they answer."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from disagg.config_checks import is_loopback
from disagg.errors import DisaggError, Unavailable
from disagg.server_address import DEFAULT_URL, address_of

Reply = TypeVar("Reply", bound=msgspec.Struct)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which server a command asks, and how long it waits."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"URL of the server (default: {DEFAULT_URL})"
    )
    add_api_key(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="seconds to wait for the server to connect or to send more (default: 600)",
    )


def add_api_key(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--api-key",
        default=os.environ.get("DISAGG_API_KEY"),
        help="API key of the server (default: the environment variable DISAGG_API_KEY)",
    )


def server_of(arguments: argparse.Namespace) -> Server:
    """Raises `StartupError` if the URL is none."""
    return Server(arguments.url, api_key=arguments.api_key, timeout_s=arguments.timeout)


# The fields of responses that are read. Unknown fields are ignored, so any OpenAI server works.


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same field in other servers
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str = ""  # of `/v1/completions`

    @property
    def has_output(self) -> bool:
        delta = self.delta
        return bool(
            self.text
            or delta.content
            or delta.reasoning_content
            or delta.reasoning
            or delta.tool_calls
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class Usage(msgspec.Struct):
    """What the server counted of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = "The server gave no reason."
    code: str | int | None = None
    type: str | None = None


class StreamChunk(msgspec.Struct):
    """One event of a streamed answer, of `/v1/chat/completions` or `/v1/completions`."""

    id: str = ""
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


class _Listed(msgspec.Struct):
    id: str
    num_parameters: int = 0  # which only disagg says


class _Models(msgspec.Struct):
    data: list[_Listed] = []


class RefusedReply(msgspec.Struct):
    """The body of an error."""

    error: _Error


class Server:
    """A client of an OpenAI server.

    The environment's `http_proxy`, `https_proxy` and `no_proxy` apply, except to this machine.

    Raises:
        StartupError: the URL is not an http or https URL.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        address = address_of(url)
        self._prefix = address.root
        is_here = is_loopback(address.host) or address.host in ("0.0.0.0", "::")
        self._open = urllib.request.build_opener(
            urllib.request.ProxyHandler({} if is_here else None)
        ).open
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = url

    def models(self) -> list[_Listed]:
        """The models that it lists. Raises as `ask`."""
        return _decode(self.ask("/v1/models"), _Models).data

    def first_model(self) -> str:
        models = self.models()
        if not models:
            raise Unavailable(f"The server at {self.url} lists no models.")
        return models[0].id

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of the response to a POST with `body`, or to a GET if `body` is None.

        Raises:
            DisaggError: the server refused the request; has the server's message.
            Unavailable: the server cannot be reached.
        """
        method, raw = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        with self._exchange(method, path, raw) as reply:
            return reply.read()

    def ask_as(self, path: str, kind: type[Reply]) -> Reply:
        """As `ask`, for a GET of what only disagg answers. Raises `DisaggError` as it does."""
        try:
            return msgspec.json.decode(self.ask(path), type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(
                f"The server has another version of disagg than this command: {error}."
            ) from error

    def chunks(self, body: dict[str, Any]) -> Generator[StreamChunk, None, None]:
        """The events of a streamed chat completion. Closing the iterator closes the connection.

        Raises:
            DisaggError: the server refused the request; has the server's message.
            Unavailable: the server cannot be reached, or the stream broke off.
        """
        with self._exchange("POST", "/v1/chat/completions", json.dumps(body).encode()) as reply:
            for line in reply:
                if not line.startswith(b"data:"):
                    continue
                event = line.removeprefix(b"data:").strip()
                if event == b"[DONE]":
                    return
                chunk = _decode(event, StreamChunk)
                if chunk.error is not None:
                    raise DisaggError(chunk.error.message)
                yield chunk
        raise Unavailable("The server closed the connection before the answer was complete.")

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        url = self._prefix + path
        request = urllib.request.Request(url, body, self._headers, method=method)  # noqa: S310
        try:
            with self._open(request, timeout=self._timeout_s) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = str(cause) or type(cause).__name__
            raise Unavailable(
                f"Cannot reach {self.url} ({reason}); start a server with `disagg serve`, or give"
                " the server's address with --url."
            ) from error


def _refusal(reply: urllib.error.HTTPError) -> DisaggError:
    try:
        message = msgspec.json.decode(reply.read(), type=RefusedReply).error.message
    except msgspec.MsgspecError:
        message = f"The server answered {reply.code} {reply.reason}."
    return DisaggError(message)


def _decode(raw: bytes, kind: type[Reply]) -> Reply:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"The server's response is not in the format of the OpenAI API: {error}."
        ) from error
