"""Chat with a server from the terminal.

Prints answers while they are generated. Ctrl-C stops an answer by closing its connection, so that
the server stops generating too. With --message it asks one question, prints only the answer and
exits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from disagg.cli.engine_arguments import number
from disagg.errors import DisaggError
from disagg.tools.server import Server, add_server_arguments, server_of

_HELP = (
    "/clear starts a new conversation, /system TEXT sets the system prompt, /exit ends the chat."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
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


def run(args: argparse.Namespace) -> int:
    """Raises `DisaggError` when the server cannot be reached or refuses the request."""
    server = server_of(args)
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
