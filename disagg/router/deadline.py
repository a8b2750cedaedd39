"""One timer for all waits of a stream. `asyncio.timeout` around each would cost more than a token.

Semantics are those of `asyncio.timeout` (Python's `asyncio/timeouts.py`): at the deadline the
waiting task is cancelled, and the cancellation becomes `DeadlineExceeded` unless somebody else
cancelled the task too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TypeVar

from disagg.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """Use as a context manager around the stream's life; `next` waits no longer than `ends_at`.

    Args:
        ends_at: on the clock of the running loop, in seconds.
    """

    def __init__(self, ends_at: float) -> None:
        self._is_over = False
        self._has_cancelled = False
        self._waiting: asyncio.Task[object] | None = None
        self._timer = asyncio.get_running_loop().call_at(ends_at, self._expire)

    def __enter__(self) -> Deadline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    async def next(self, stream: AsyncGenerator[T, None]) -> T:
        """`anext(stream)`.

        Raises:
            DeadlineExceeded: there is no time left, or it ran out while waiting.
        """
        if self._is_over:
            raise _exceeded()
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        self._waiting = task
        try:
            return await anext(stream)
        except asyncio.CancelledError:
            if self._has_cancelled and task.cancelling() == num_cancels + 1:
                raise _exceeded() from None
            raise
        finally:
            self._waiting = None
            if self._has_cancelled:
                task.uncancel()

    def _expire(self) -> None:
        self._is_over = True
        if self._waiting is not None:
            self._has_cancelled = True
            self._waiting.cancel()


def _exceeded() -> DeadlineExceeded:
    return DeadlineExceeded(
        "The request's deadline passed before its answer was complete; ask for fewer tokens or"
        " allow more time."
    )
