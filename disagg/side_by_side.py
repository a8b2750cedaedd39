"""Does work on many items, some of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


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
