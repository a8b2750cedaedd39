"""Measures how long the streams of an ingress wait while it reads a heavy request.

    python -m bench.stalls [--streams 32] [--rounds 5] [--tiny]

The real HTTP application runs in one process. Simulated workers give each stream a token every
5 ms, and a heartbeat on the same event loop looks at the clock each millisecond. Meanwhile one
heavy request after another is sent. `stream ms` is the longest time between two events of any
stream while the request is answered, and `loop ms` the longest between two heartbeats: medians of
the rounds. `idle` is a second without such a request. The goal is that no stream waits GOAL_MS
longer than at idle.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import time
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import replace
from typing import Any

from bench.report import finish, print_table
from disagg.api.http.app import HttpApp, Readiness
from disagg.api.service import Service
from disagg.config import HttpConfig
from disagg.messages import GenerateRequest, TokenDelta
from disagg.text.chat_template import ChatTemplate
from disagg.token_fast_path import TokenCallback
from tests.api.fakes import TOKENIZER, served_model

GOAL_MS = 50
MAX_MODEL_LEN = 1 << 17  # of Llama 3.1 and Qwen 3
TOKEN_S = 0.005
HEARTBEAT_S = 0.001
IDLE_S = 1.0
SETTLE_S = 0.2
WORD = tuple(TOKENIZER.encode(" the", add_special_tokens=False))  # one token

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function | tojson }}{% endfor %}{% endfor %}{{ tools | tojson }}"
)
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


def requests(nbytes: int) -> dict[str, tuple[str, bytes]]:
    """What to send: name -> path and body of about `nbytes`."""
    half = nbytes // 2
    plain: dict[str, tuple[str, dict[str, Any]]] = {
        "text of a prompt": (TEXT, {"prompt": "the fox " * (nbytes // 8)}),
        "text of a message": (CHAT, {"messages": [{"role": "user", "content": "a" * nbytes}]}),
        "arguments, a text": (CHAT, calling(json.dumps({"a": "b" * (10 * nbytes // 16)}))),
        "arguments, empty lists": (CHAT, calling("[" + "[]," * (nbytes // 3) + "1]")),
        "arguments, allowed lists": (CHAT, calling("[" + "[]," * (nbytes // 80) + "1]")),
        "ids": (TEXT, {"prompt": [5] * (nbytes // 3)}),
        "ids with echo": (
            TEXT,
            {"prompt": [[5] * (nbytes // 2048)] * 128, "echo": True, "max_tokens": 1},
        ),
        "/detokenize": ("/detokenize", {"tokens": [5] * (nbytes // 20)}),
        "messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * (nbytes // 120)}),
        "schema of a tool": (
            CHAT,
            {
                **HI,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"enum": ["a" * 100] * (nbytes // 104)},
                        },
                    }
                ],
            },
        ),
        "unknown field, text": (CHAT, {**HI, "unknown": "[{," * (nbytes // 3)}),
    }
    bodies = {
        name: (path, json.dumps({**body, "max_tokens": 1}).encode())
        for name, (path, body) in plain.items()
    }
    many = {
        "empty lists": b"[]," * (nbytes // 3),
        "allowed lists": b"[]," * (nbytes // 80),
        "numbers": b"1.5," * (nbytes // 4),
        "allowed numbers": b"1.5," * (nbytes // 17),
        "surrogate pair, texts": b'"\\ud83d\\ude00",' + b'"",' * (half // 16),
    }
    start = json.dumps(HI).encode()[:-1] + b',"unknown":['
    return bodies | {name: (CHAT, start + values + b"1]}") for name, values in many.items()}


class Longest:
    """The longest time between two beats since it was last asked."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()
        self._longest_s = 0.0

    def beat(self) -> None:
        now = time.perf_counter()
        self._longest_s = max(self._longest_s, now - self._last_s)
        self._last_s = now

    def take_ms(self) -> float:
        """The time since the last beat counts as well: the next may be far."""
        self._longest_s = max(self._longest_s, time.perf_counter() - self._last_s)
        longest_s, self._longest_s = self._longest_s, 0.0
        return 1e3 * longest_s


async def play(
    request: GenerateRequest, on_token: TokenCallback
) -> AsyncGenerator[TokenDelta, None]:
    """A worker that only keeps time."""
    last = request.sampling.max_tokens - 1
    for number in itertools.count():
        await asyncio.sleep(TOKEN_S)
        reason = "length" if number == last else None
        yield TokenDelta(0, WORD, reason)  # type: ignore[arg-type]
        if number == last:
            return


async def send(app: HttpApp, path: str, body: bytes, beats: Longest | None = None) -> int:
    """Its status. `beats` hears of every event of the answer."""
    incoming = asyncio.Queue[MutableMapping[str, Any]]()
    incoming.put_nowait({"type": "http.request", "body": body})
    status = 0

    async def take(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        if beats is not None:
            beats.beat()

    headers = [(b"host", b"bench"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path}
    await app({**scope, "headers": headers}, incoming.get, take)
    return status


async def heart(beats: Longest) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        beats.beat()


async def measure(
    num_streams: int, rounds: int, nbytes: int, idle_s: float
) -> list[dict[str, Any]]:
    model = replace(
        served_model(max_model_len=MAX_MODEL_LEN),
        template=ChatTemplate(TEMPLATE, {}),
        block_size=16,
    )
    service = Service({model.name: model}, play, default_timeout_s=3600.0)
    config = HttpConfig(max_requests_nbytes=1 << 30)
    app = HttpApp(service, config, readiness=lambda: Readiness(ready=True))
    endless = {"prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": MAX_MODEL_LEN // 2}
    streams, loop = [Longest() for _ in range(num_streams)], Longest()
    gc.freeze()  # as an ingress does
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(heart(loop))]
    ask = json.dumps(endless).encode()
    tasks += [asyncio.create_task(send(app, TEXT, ask, beats)) for beats in streams]
    cases = {"idle": None, **requests(nbytes)}
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    statuses = {}
    for _ in range(rounds):
        for name, request in cases.items():
            await asyncio.sleep(SETTLE_S)
            for beats in (*streams, loop):
                beats.take_ms()
            began_s = time.perf_counter()
            if request is None:
                await asyncio.sleep(idle_s)
            else:
                statuses[name] = await send(app, *request)
            took_s = time.perf_counter() - began_s
            await asyncio.sleep(4 * TOKEN_S)  # the events that waited
            longest_ms = max(beats.take_ms() for beats in streams)
            taken[name].append((longest_ms, loop.take_ms(), took_s))
    if any(task.done() for task in tasks):
        raise SystemExit("a stream has ended before the measurement did")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    rows = []
    for name, turns in taken.items():
        stream_ms, loop_ms, took_s = map(statistics.median, zip(*turns, strict=True))
        row = {"request": name, "status": statuses.get(name), "MB": 0.0, "took s": took_s}
        asked = cases[name]
        if asked is not None:
            row["MB"] = len(asked[1]) / 1e6
        rows.append({**row, "stream ms": stream_ms, "loop ms": loop_ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    if arguments.tiny:
        rows = asyncio.run(measure(4, 1, 1 << 18, 0.1))
    else:
        rows = asyncio.run(measure(arguments.streams, arguments.rounds, 15_000_000, IDLE_S))
    print_table(rows)
    idle_ms = rows[0]["stream ms"]
    above = [row["request"] for row in rows if row["stream ms"] > idle_ms + GOAL_MS]
    finish("stalls", rows, goal_ms=GOAL_MS, above=above)


if __name__ == "__main__":
    main()
