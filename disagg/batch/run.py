"""Runs a batch: reads the lines of a file, asks, and writes the answers, each of them once.

An answer is in the output as soon as it is there. So a run that was killed is repeated, and goes on
with what is not answered. Files are read and written in threads: the event loop may be a server's.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from disagg.batch.ask import Ask
from disagg.batch.lines import answer_line, error_line, name_of, read_line
from disagg.errors import InvalidRequest, RequestError, StartupError

T = TypeVar("T")

READ_NBYTES = 1 << 20
MAX_LINE_NBYTES = 16 << 20  # as the largest body of a request


class BatchIsRunning(StartupError):
    """Another process writes the same output."""


@dataclass
class Counts:
    """How far a batch is; `num_kept` answers are of earlier runs and count as completed."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    num_kept: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed


class AnswerFiles:
    """The output and the error file of a batch. Nobody else writes them until they are closed.

    Raises:
        BatchIsRunning: somebody else does.
        OSError: a file cannot be written.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        with ExitStack() as on_error:
            self._output = on_error.enter_context(open(output, "a+b", buffering=0))
            try:
                fcntl.flock(self._output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchIsRunning(
                    f"Another process writes {output}; wait for its end, or choose another file.",
                    param="output",
                ) from None
            self._errors = on_error.enter_context(open(errors, "a+b", buffering=0))
            self._files = on_error.pop_all()
        self._pending: tuple[list[bytes], list[bytes]] = ([], [])  # of the output, of the errors
        self._writing: asyncio.Task[None] | None = None

    def resume(self) -> set[str]:
        """The ids of answered requests. What a killed run wrote of a last line is cut off, and
        errors are deleted: requests that failed are tried again.

        Raises:
            StartupError: the output is a file of another kind.
        """
        names: set[str] = set()
        with open(self._output.name, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    self._output.truncate(file.tell() - len(line))
                elif (name := name_of(line)) is not None:
                    names.add(name)
                else:
                    raise StartupError(
                        f"{self._output.name} has other lines than answers to requests; name"
                        " another file.",
                        param="output",
                    )
        self._errors.truncate(0)
        return names

    def add(self, line: bytes, *, failed: bool) -> None:
        """Write a line soon. Raises `OSError` if earlier ones could not be written."""
        self._pending[failed].append(line)
        if self._writing is None or self._writing.done():
            if self._writing is not None:
                self._writing.result()
            self._writing = asyncio.create_task(self._write())

    async def flush(self) -> None:
        """Write what was added. Raises `OSError`."""
        if self._writing is not None:
            await self._writing

    def close(self) -> None:
        """Let others write."""
        self._files.close()

    async def _write(self) -> None:
        while any(self._pending):
            (answers, errors), self._pending = self._pending, ([], [])
            await asyncio.to_thread(self._append, b"".join(answers), b"".join(errors))

    def _append(self, answers: bytes, errors: bytes) -> None:
        for file, lines in ((self._output, answers), (self._errors, errors)):
            view = memoryview(lines)
            while view:
                view = view[os.write(file.fileno(), view) :]


async def run_batch(
    source: Path,
    files: AnswerFiles,
    ask: Ask,
    num_at_once: int,
    *,
    counts: Counts | None = None,
    only: str | None = None,
) -> Counts:
    """Answer the requests of a file that are not answered yet.

    Args:
        ask: its `RequestError`s become lines of the error file, as refusals do.
        num_at_once: number of requests that are sent at a time.
        counts: is kept up to date.
        only: the path that all requests must name.

    Raises:
        Unavailable: the server is gone; the same call goes on later.
        StartupError: the output has answers to other requests.
        OSError: a file cannot be read or written.
    """
    counts = counts or Counts()
    numbers: dict[str, int] = {}  # custom id -> its line

    async def answer(item: tuple[int, bytes]) -> None:
        number, raw = item
        try:
            line = read_line(raw, number, only)
            _check_new(line.custom_id, number, numbers)
            if line.custom_id in kept:
                counts.num_kept += 1
                counts.completed += 1
                return
            reply = await ask(line.url, bytes(line.body))
        except RequestError as error:
            counts.failed += 1
            files.add(error_line(name_of(raw), error.code, error.message), failed=True)
            return
        has_failed = reply.status != 200
        counts.failed += has_failed
        counts.completed += not has_failed
        files.add(answer_line(line.custom_id, reply), failed=has_failed)

    try:
        kept = await asyncio.to_thread(files.resume)
        counts.total = await asyncio.to_thread(_count, source, kept)
        await side_by_side(answer, _lines(source), num_at_once)
    finally:
        await files.flush()
    return counts


async def side_by_side(
    work: Callable[[T], Awaitable[None]], items: AsyncIterator[T], num_at_once: int
) -> None:
    """Await `work` for each item, of which the next is taken when another one is done.

    Raises:
        Exception: the first failure; work that still runs is cancelled.
    """
    taking = asyncio.Lock()

    async def take_turns() -> None:
        while True:
            async with taking:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await work(item)

    tasks = [asyncio.create_task(take_turns()) for _ in range(num_at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_new(custom_id: str, number: int, numbers: dict[str, int]) -> None:
    first = numbers.setdefault(custom_id, number)
    if first != number:
        raise InvalidRequest(
            f"Line {number} has the custom_id {custom_id[:64]!r} of line {first}; each must have"
            " one of its own.",
            code="duplicate_custom_id",
            param="custom_id",
        )


def _count(source: Path, kept: set[str]) -> int:
    """The number of lines. Raises `StartupError` if `kept` has a name that none of them has."""
    number, others = 0, set(kept)
    with open(source, "rb") as file:
        while lines := _read_some(file):
            for line in filter(bytes.strip, lines):
                number += 1
                if others:
                    others.discard(name_of(line) or "")
    if others:
        raise StartupError(
            f"The output already has answers to other requests, such as {min(others)[:64]!r}, which"
            f" {source} does not have; name another file.",
            param="output",
        )
    return number


async def _lines(source: Path) -> AsyncGenerator[tuple[int, bytes], None]:
    """The lines that are not empty, with their numbers from 1."""
    number = 0
    with await asyncio.to_thread(source.open, "rb") as file:
        while lines := await asyncio.to_thread(_read_some, file):
            for line in lines:
                number += 1
                if line.strip():
                    yield number, line


def _read_some(file: BinaryIO) -> list[bytes]:
    """The next lines, together about `READ_NBYTES`. Of a line that is too long, only the beginning,
    which is no JSON."""
    lines: list[bytes] = []
    nbytes = 0
    while nbytes < READ_NBYTES and (line := file.readline(MAX_LINE_NBYTES)):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_NBYTES)):
            pass
        lines.append(line)
        nbytes += len(line)
    return lines
