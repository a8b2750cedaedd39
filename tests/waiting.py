"""Waiting for what other tasks, threads and processes bring about, and a clock that tests turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0  # for what hangs: a busy machine may take long


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object]) -> None:
    """As `until`, in a thread without a loop."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen"
        time.sleep(0.001)


class Clock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
