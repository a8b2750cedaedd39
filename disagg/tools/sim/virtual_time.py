"""An asyncio loop whose clock jumps to the next timer. It is the event queue of a simulation.

It never waits for anything outside of the process, so two runs of the same coroutine are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappen(RuntimeError):
    """Raised in a deadlock: every task waits, and no timer is left."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, which begins at 0 s and passes only while every task waits."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._selector = self  # the base class waits by calling its `select`

    def time(self) -> float:
        return self._seconds

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the clock. The base class calls it with the time until its next timer."""
        if timeout is None:
            raise NothingWillHappen
        self._seconds += timeout
        return []

    def _process_events(self, events: list[Any]) -> None:
        """Do nothing, because there are no events from outside."""

    def _write_to_self(self) -> None:
        """Do nothing, because no other thread could wake the loop."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` does in real time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
