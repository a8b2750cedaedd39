"""Chat with a server from the terminal.

Prints answers while they are generated. Ctrl-C stops an answer by closing its connection, so that
the server stops generating too. With --message it asks one question, prints only the answer and
exits.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.text import Text

from disagg.cli.engine_arguments import number
from disagg.config_checks import is_loopback
from disagg.errors import DisaggError, StartupError, Unavailable

Answer = TypeVar("Answer", bound=msgspec.Struct)

_HELP = (
    "/clear starts a new conversation, /system TEXT sets the system prompt, /exit ends the chat."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="URL of the server (default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--model", help="name of the model (default: the first model that the server lists)"
    )
    parser.add_argument(
        "--message", help="ask this one question and exit; - reads it from standard input"
    )
    parser.add_argument("--system", help="system prompt of the conversation")
    parser.add_argument(
        "--max-tokens",
        type=number,
        help="largest length of an answer (default: the server decides)",
    )
    parser.add_argument(
        "--temperature", type=float, help="sampling temperature (default: the server decides)"
    )
    parser.add_argument("--seed", type=int, help="sampling seed (default: random)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("DISAGG_API_KEY"),
        help="API key of the server (default: the environment variable DISAGG_API_KEY)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="seconds to wait for the server to connect or to send more (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Raises `DisaggError` when the server cannot be reached or refuses the request."""
    server = Server(args.url, api_key=args.api_key, timeout_s=args.timeout)
    options = {
        name: value
        for name in ("max_tokens", "temperature", "seed")
        if (value := getattr(args, name)) is not None
    }
    conversation = ChatSession(
        server, args.model or server.first_model(), options, system=args.system
    )
    if args.message is not None:
        question = sys.stdin.read() if args.message == "-" else args.message
        for piece in conversation.ask(question):
            print("" if piece.is_reasoning else piece.text, end="", flush=True)
        print()
        return 0
    return _talk(conversation, Console(highlight=False))


# The fields of responses that are read. Unknown fields are ignored, so any OpenAI server works.


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same field in other servers


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = "The server gave no reason."


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Listed(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Listed] = []


class _Refusal(msgspec.Struct):
    error: _Error


class Server:
    """A client of an OpenAI server. The path of `url` may end with `/v1`.

    The environment's `http_proxy`, `https_proxy` and `no_proxy` apply, except to this machine.

    Raises:
        StartupError: the URL is not an http or https URL.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"{url!r} is not a URL like http://127.0.0.1:8000.", param="url")
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._prefix = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        is_here = is_loopback(parts.hostname) or parts.hostname in ("0.0.0.0", "::")
        self._open = urllib.request.build_opener(
            urllib.request.ProxyHandler({} if is_here else None)
        ).open
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = url

    def first_model(self) -> str:
        with self._exchange("GET", "/v1/models") as reply:
            models = _decode(reply.read(), _Models).data
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

    def chunks(self, body: dict[str, Any]) -> Generator[_Chunk, None, None]:
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
                chunk = _decode(event, _Chunk)
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
        message = msgspec.json.decode(reply.read(), type=_Refusal).error.message
    except msgspec.MsgspecError:
        message = f"The server answered {reply.code} {reply.reason}."
    return DisaggError(message)


def _decode(raw: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"The server's response is not in the format of the OpenAI API: {error}."
        ) from error


class Piece(NamedTuple):
    """The next piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass
class ChatSession:
    """One conversation: its turns so far and its settings."""

    server: Server
    model: str
    options: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    num_tokens: int = 0  # length of the last answer

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Ask, and yield the answer in pieces.

        The question and the part of the answer that arrived become a turn of the conversation; a
        question without any answer does not.
        """
        message = {"role": "user", "content": question}
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*instructions, *self.turns, message],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        answer = ""
        self.num_tokens = 0
        try:
            with closing(self.server.chunks(body)) as chunks:
                for chunk in chunks:
                    if chunk.usage is not None:
                        self.num_tokens = chunk.usage.completion_tokens
                    for choice in chunk.choices[:1]:
                        delta = choice.delta
                        if thought := delta.reasoning_content or delta.reasoning:
                            yield Piece(thought, is_reasoning=True)
                        answer += delta.content or ""
                        yield Piece(delta.content or "")
        finally:
            if answer:
                self.turns += [message, {"role": "assistant", "content": answer}]


def _talk(conversation: ChatSession, console: Console) -> int:
    console.print(Text(f"{conversation.model} at {conversation.server.url}. {_HELP}", style="dim"))
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return 0
        if command == "/clear":
            conversation.turns.clear()
        elif command == "/system":
            conversation.system = rest or None
        elif command.startswith("/"):
            console.print(Text(_HELP, style="dim"))
        elif line:
            _show_answer(conversation, line, console)


def _show_answer(conversation: ChatSession, question: str, console: Console) -> None:
    started_s = time.monotonic()
    first_s: float | None = None
    pieces = conversation.ask(question)
    try:
        was_reasoning = False
        for text, is_reasoning in pieces:
            if text and first_s is None:
                first_s = time.monotonic() - started_s
            if text and was_reasoning and not is_reasoning:
                console.print("\n")
            was_reasoning = is_reasoning or (was_reasoning and not text)
            # Escape characters are removed, so that a model cannot control the terminal.
            style = "dim" if is_reasoning else ""
            console.print(Text(text.replace("\x1b", ""), style), end="", soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()  # closes the connection
        console.print(Text(" (stopped)", style="dim"), end="")
    except DisaggError as error:
        console.print(Text("\n" + error.message if first_s else error.message, style="red"), end="")
    console.print()
    if first_s is not None and conversation.num_tokens:
        total_s = time.monotonic() - started_s
        figures = (
            f"{conversation.num_tokens} tokens, first after {first_s:.2f} s,"
            f" {conversation.num_tokens / total_s:.0f} tokens/s"
        )
        console.print(Text(figures, style="dim"))
