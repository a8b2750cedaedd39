"""An asyncio loop whose clock jumps to the next timer. It is the event queue of a simulation.

It never waits for anything outside of the process, so two runs of the same coroutine are equal.
What is due in the same nanosecond happens in the order in which it was scheduled. Otherwise
rounding would decide which of two equal transfers ends first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from heapq import heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
NUM_DIGITS = 9  # of seconds, by which timers are ordered


class NothingWillHappen(RuntimeError):
    """Raised in a deadlock: every task waits, and no timer is left."""


class _Timer(asyncio.TimerHandle):
    _scheduled: bool

    def __init__(self, number: int, *of_handle: Any) -> None:
        super().__init__(*of_handle)
        self._order = round(self.when(), NUM_DIGITS), number

    def __lt__(self, other: object) -> bool:
        return isinstance(other, _Timer) and self._order < other._order


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, which begins at 0 s and passes only while every task waits."""

    _scheduled: list[asyncio.TimerHandle]  # the heap of the base class

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._numbers = itertools.count()
        self._selector = self  # the base class waits by calling its `select`

    def time(self) -> float:
        return self._seconds

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(next(self._numbers), when, callback, args, self, context)
        heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the clock. The base class calls it with the time until its next timer."""
        if timeout is None:
            raise NothingWillHappen
        if timeout:  # not `self._seconds + timeout`, which is rounded
            self._seconds = max(self._seconds, self._scheduled[0].when())
        return []

    @contextmanager
    def back_at(self, seconds: float) -> Iterator[None]:
        """Let the clock show an earlier time, to do then what nobody has looked for until now."""
        now, self._seconds = self._seconds, seconds
        try:
            yield
        finally:
            self._seconds = now

    def _process_events(self, events: list[Any]) -> None:
        """Do nothing, because there are no events from outside."""

    def _write_to_self(self) -> None:
        """Do nothing, because no other thread could wake the loop."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` does in real time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
