"""The short way of a token: from the link that it arrives on to the client, within one turn.

While its answer is generated, the task of a request sleeps. To wake it for each token, and to hand
the token up through the iterators of link, dispatch, answer and HTTP, takes longer than what these
do with it. So each hands the one below it a function, and the link calls it where the token
arrives. Only plain tokens go this way, and only while the task waits for one: the first and the
last delta, tickets and errors wake the task, and so does a client that reads too slowly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeAlias

from disagg.messages import TokenDelta

# False: not taken, the task must be woken for it. An awaitable: taken, but the task has to await
# what is left to do before anything else of the stream.
Taken: TypeAlias = bool | Awaitable[None]
Direct: TypeAlias = Callable[[TokenDelta], Taken]


def begun(coroutine: Coroutine[Any, Any, None]) -> Taken:
    """Run a coroutine here until it ends or waits for something. Returns what is left of it."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return True
    return _Rest(coroutine, waits_for)


class _Rest:
    """A coroutine that waits for a future, to be awaited by a task that takes it over."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    result = yield waits_for
                except BaseException as error:  # of the future, or the task was cancelled
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(result)
        except StopIteration:
            return
