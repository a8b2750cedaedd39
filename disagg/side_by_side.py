"""Does work on many items, some of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def side_by_side(
    work: Callable[[T], Awaitable[None]], items: Iterable[T], num_at_once: int
) -> None:
    """Await `work` for each item, of which the next is taken when another one is done.

    Raises:
        Exception: the first failure; work that still runs is cancelled.
    """
    waiting = iter(items)

    async def take_turns() -> None:
        for item in waiting:
            await work(item)

    tasks = [asyncio.create_task(take_turns()) for _ in range(num_at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
