"""Clients over raw sockets, which write down all that they saw; and a load of them, in open loop.

A client may leave at any moment, or read slowly. What it read is judged elsewhere (`oracles`).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletionChunk

from tests.engine.fake_runner import VOCAB_SIZE
from tests.faults.fake_model import expected_text, to_text

PATIENCE_S = 120.0  # after which a stream counts as hung
MOST_PROMPT_TOKENS = 300  # after a prefix of at most as many
MOST_TOKENS = 100


@dataclass(frozen=True)
class Question:
    """What to ask, and so what the answer must be."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def expected(self) -> str:
        return expected_text(
            self.prompt, self.max_tokens, temperature=self.temperature, seed=self.seed
        )

    def to_http(self, host: str) -> bytes:
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": to_text(self.prompt)}],
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass
class Answer:
    """What a client saw.

    came_at: `time.monotonic()` of each event with text.
    num_ends: finish reasons and errors.
    trouble: why the client stopped before the end of the body.
    """

    question: Question
    asked_at: float
    request_id: str = ""  # ours, as events show it
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    came_at: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    num_ends: int = 0
    is_done: bool = False  # `[DONE]`, or an error
    has_left: bool = False
    trouble: str = ""

    def take(self, event: bytes) -> None:
        """One server-sent event. Raises on anything that is not in OpenAI's schema."""
        if event.startswith(b":"):
            return
        assert event.startswith(b"data: ") and not self.is_done, event
        if event == b"data: [DONE]":
            self.is_done = True
            return
        raw = json.loads(event.removeprefix(b"data: "))
        if "error" in raw:
            self._take_error(raw)
            return
        chunk = ChatCompletionChunk.model_validate(raw)
        self.request_id = chunk.id
        for choice in chunk.choices:
            if choice.delta.content:
                assert self.num_ends == 0, "text after the end"
                self.text += choice.delta.content
                self.came_at.append(time.monotonic())
            if choice.finish_reason is not None:
                self.num_ends += 1
                self.finish_reason = choice.finish_reason

    def take_body(self, body: bytes) -> None:
        """A reply that is no stream, which must be an error of ours; a proxy's own is trouble."""
        try:
            self._take_error(json.loads(body))
        except ValueError:
            self.trouble = f"{self.status} with a body that is not ours: {body[:100]!r}"

    def _take_error(self, raw: dict[str, Any]) -> None:
        assert set(raw) == {"error"}, raw
        assert set(raw["error"]) == {"message", "type", "param", "code"}, raw
        self.error = raw["error"]
        self.num_ends += 1
        self.is_done = True  # nothing follows an error, not even `[DONE]`


async def ask(
    port: int,
    question: Question,
    *,
    leaves_after_s: float | None = None,
    reads_nbytes: int = 1 << 16,
) -> Answer:
    """Ask, and read to the end, unless the client is to leave before.

    Args:
        leaves_after_s: hang up then, wherever the answer is.
        reads_nbytes: at most so many a tenth of a second, if not the default.
    """
    answer = Answer(question, time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=reads_nbytes)
    try:
        async with asyncio.timeout(PATIENCE_S if leaves_after_s is None else leaves_after_s):
            writer.write(question.to_http(f"127.0.0.1:{port}"))
            await _read_answer(reader, answer, reads_nbytes)
    except TimeoutError:
        answer.has_left = leaves_after_s is not None
        answer.trouble = "left" if answer.has_left else "hung"
    except (OSError, asyncio.IncompleteReadError) as error:
        answer.trouble = repr(error)
    finally:
        writer.transport.abort()
    return answer


async def _read_answer(reader: asyncio.StreamReader, answer: Answer, nbytes: int) -> None:
    answer.status = int((await _line(reader)).split()[1])
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        answer.headers[name.lower()] = value.strip()
    if answer.headers.get("transfer-encoding") != "chunked":
        answer.take_body(await reader.readexactly(int(answer.headers["content-length"])))
        return
    rest = b""
    async for piece in _pieces(reader):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            answer.take(event)
        if nbytes < 1 << 16:
            await asyncio.sleep(0.1 * len(piece) / nbytes)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a chunked body."""
    while nbytes := int(await _line(reader), 16):
        yield await reader.readexactly(nbytes)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise asyncio.IncompleteReadError(line, None)
    return line


class Questions:
    """Draws questions: greedy and seeded by turns, some with prefixes that others have too."""

    def __init__(self, rng: random.Random, model: str, *, num_prefixes: int = 4) -> None:
        self._rng = rng
        self._model = model
        lengths = [rng.randrange(MOST_PROMPT_TOKENS) for _ in range(num_prefixes)]
        self._prefixes = [self._tokens(length) for length in lengths] or [()]

    def next(self, max_tokens: int | None = None) -> Question:
        rng = self._rng
        prefix = rng.choice(self._prefixes)
        return Question(
            self._model,
            prefix + self._tokens(rng.randint(1, MOST_PROMPT_TOKENS)),
            max_tokens or rng.randint(1, MOST_TOKENS),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1 << 31),
        )

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(num))


class Load:
    """Asks at a constant rate, whatever becomes of the answers."""

    def __init__(self, port: int, questions: Questions, rate: float) -> None:
        self._port = port
        self._questions = questions
        self._rate = rate
        self._tasks: list[asyncio.Task[Answer]] = []

    async def answers(self) -> list[Answer]:
        """Of all that was asked so far and not taken."""
        return await asyncio.gather(*self._tasks)

    def take_done(self) -> list[Answer]:
        """The answers that there are, to be forgotten here."""
        done = [task.result() for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        return done

    async def keep_asking(self) -> None:
        while True:
            question = self._questions.next()
            self._tasks.append(asyncio.create_task(ask(self._port, question)))
            await asyncio.sleep(1 / self._rate)


@asynccontextmanager
async def load(port: int, questions: Questions, rate: float) -> AsyncIterator[Load]:
    """A load while the block runs; afterwards nothing new is asked, but answers may be open."""
    running = Load(port, questions, rate)
    asking = asyncio.create_task(running.keep_asking())
    try:
        yield running
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
