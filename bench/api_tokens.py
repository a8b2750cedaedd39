"""Measures what each API of the ingress costs for a token of a stream, in CPU time.

    python -m bench.api_tokens [--tokens 2000] [--rounds 15] [--tiny]

The real HTTP application runs in one process. A fake worker has its tokens ready, one in each
delta, and the client throws events away. `us` is the CPU time of the whole process for each token:
the median of rounds in which all cases take turns, so other programs on the machine matter little.
`more us` is the difference from a stream of `/v1/completions`, which only detokenizes. The goal for
each case is GOAL_US. Cases:

- `text`: no parser runs.
- `text, tools`: a model that may call functions and does not.
- `reasoning`: all tokens are reasoning.
- `call`: all tokens are arguments of one call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, MutableMapping
from functools import partial
from typing import Any, NamedTuple

from bench.report import finish, print_table, take_turns
from disagg.api.http.app import HttpApp, Readiness
from disagg.api.service import Service
from disagg.config import HttpConfig
from disagg.messages import GenerateRequest, TokenDelta
from disagg.token_fast_path import TokenCallback
from tests.api.fakes import CHATML, END, TOKENIZER, served_model

GOAL_US = 2.0
WORDS = "the quick brown fox jumps over the lazy dog, again and again and again. "
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TEMPLATE = "{# <tool_call> <think> </think> #}{{ tools | tojson if tools }}" + CHATML
TEXT, REASONING, CALL = (
    ("", ""),
    ("<think>", "</think>done"),
    (
        '<tool_call>\n{"name": "look", "arguments": {"at": "',
        '"}}\n</tool_call>',
    ),
)


class Case(NamedTuple):
    """Attributes: around: what the model says before and after the words; fields: of the body."""

    path: str
    says: str
    around: tuple[str, str]
    fields: dict[str, Any]
    template: str = CHATML


def cases() -> list[Case]:
    found = [Case("/v1/completions", "text", TEXT, {"prompt": "hi"})]
    messages = [{"role": "user", "content": "hi"}]
    for path, fields, tool in (
        (
            "/v1/chat/completions",
            {"messages": messages},
            {"type": "function", "function": FUNCTION},
        ),
        ("/v1/responses", {"input": "hi"}, {"type": "function", **FUNCTION}),
        ("/v1/messages", {"messages": messages}, {"name": "look", "input_schema": SCHEMA}),
    ):
        found.append(Case(path, "text", TEXT, fields))
        with_tools = {**fields, "tools": [tool]}
        for says, around in (("text, tools", TEXT), ("reasoning", REASONING), ("call", CALL)):
            found.append(Case(path, says, around, with_tools, TEMPLATE))
    return found


def deltas_of(case: Case, num_tokens: int) -> list[TokenDelta]:
    before, after = (TOKENIZER.encode(each, add_special_tokens=False) for each in case.around)
    words = TOKENIZER.encode(WORDS, add_special_tokens=False)
    said = (words * (num_tokens // len(words) + 1))[:num_tokens]
    deltas = [TokenDelta(0, (token_id,)) for token_id in (*before, *said, *after)]
    return [*deltas, TokenDelta(0, (END,), "stop")]


def app_of(case: Case, deltas: list[TokenDelta]) -> HttpApp:
    model = served_model(max_model_len=1 << 17, template=case.template)

    async def play(
        request: GenerateRequest, on_token: TokenCallback
    ) -> AsyncGenerator[TokenDelta, None]:
        for delta in deltas:
            yield delta

    service = Service({model.name: model}, play, default_timeout_s=3600.0)
    return HttpApp(service, HttpConfig(), readiness=lambda: Readiness(ready=True))


async def stream_us(app: HttpApp, path: str, body: bytes, num_tokens: int) -> float:
    """Microseconds of processor time for each token of one answer."""
    incoming = asyncio.Queue[MutableMapping[str, Any]]()
    incoming.put_nowait({"type": "http.request", "body": body})
    status, num_events = 0, 0

    async def take(message: MutableMapping[str, Any]) -> None:
        nonlocal status, num_events
        status, num_events = message.get("status", status), num_events + 1

    headers = [(b"host", b"bench"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path}
    began_s = time.process_time()
    await app({**scope, "headers": headers}, incoming.get, take)
    took_s = time.process_time() - began_s
    if status != 200 or num_events < num_tokens // 2:
        raise SystemExit(f"{path} answered {status} with {num_events} events")
    return 1e6 * took_s / num_tokens


def measure(num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    contenders = {}
    for case in cases():
        deltas = deltas_of(case, num_tokens)
        limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
        fields = {limit: len(deltas), "stream": True}
        body = json.dumps({**case.fields, **fields}).encode()
        app = app_of(case, deltas)
        contenders[case.path, case.says] = partial(
            lambda app, path, body, number: asyncio.run(stream_us(app, path, body, number)),
            app, case.path, body, len(deltas),
        )  # fmt: skip
    taken = take_turns(contenders, rounds)
    least = taken["/v1/completions", "text"]
    return [
        {"path": path, "says": says, "us": us, "more us": us - least}
        for (path, says), us in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    rows = measure(200, 1) if arguments.tiny else measure(arguments.tokens, arguments.rounds)
    print_table(rows)
    above = [f"{row['path']}: {row['says']}" for row in rows if row["more us"] > GOAL_US]
    finish("api_tokens", rows, goal_us=GOAL_US, above=above)


if __name__ == "__main__":
    main()
