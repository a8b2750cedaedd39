"""An asyncio loop whose clock jumps to the next timer: the events of a simulation, and their heap.

It never waits for anything outside of the process, so two runs of the same coroutine are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappen(RuntimeError):
    """Deadlock: every task waits, and no timer is left."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Seconds begin at 0 and pass only while every task waits."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._selector = self  # what the base class waits with

    def time(self) -> float:
        return self._seconds

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the base class with the time until its next timer."""
        if timeout is None:
            raise NothingWillHappen
        self._seconds += timeout
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none from outside."""

    def _write_to_self(self) -> None:
        """Nobody else could wake it."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, as `asyncio.run` does, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
