"""Iterates over deltas that are passed to a function, and passes on those of an iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from disagg.api.running_job import Generate
from disagg.messages import NO_STREAM, GenerateRequest, PutDelta, Start, TokenDelta


async def pull(run: Callable[[PutDelta], Awaitable[None]]) -> AsyncGenerator[TokenDelta, None]:
    """The deltas that `run` passes on, and then its error. Closing the iterator cancels it."""
    arrived: asyncio.Queue[TokenDelta | None] = asyncio.Queue()

    async def work() -> None:
        try:
            await run(arrived.put_nowait)
        finally:
            arrived.put_nowait(None)

    task = asyncio.create_task(work())
    try:
        while (delta := await arrived.get()) is not None:
            yield delta
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def answers(source: Any, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    """The answer of a dispatcher, or of an escalation."""
    return pull(lambda put: source.generate(request, put))


def open_stream(
    link: Any, request: GenerateRequest, *how: Any, timeout_s: float = 60.0
) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of a request on a link. `how`: whether it is handed over, and its ticket."""
    start = Start(NO_STREAM, request, *how)
    return pull(lambda put: link.run(start, put, timeout_s=timeout_s))


def push(deltas_of: Callable[[GenerateRequest], AsyncGenerator[TokenDelta, None]]) -> Generate:
    async def generate(request: GenerateRequest, put: PutDelta) -> None:
        async with aclosing(deltas_of(request)) as deltas:
            async for delta in deltas:
                put(delta)

    return generate
