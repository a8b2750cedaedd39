"""The fast path of a token in an ingress: from its link to the client, in one turn of the loop.

Waking a request's task for each token, and passing the token through the iterators of link,
dispatch, answer and HTTP, would cost more than the work itself. So each layer gives the layer below
a callback (`TokenCallback`). The link calls its callback when a token arrives, and the task sleeps
on. Only plain tokens take this path, and only while the task waits for one. The first and the last
delta, tickets and errors wake the task, and so does a client that reads too slowly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeAlias

from disagg.messages import TokenDelta

# What a callback returns. True: it has done all. False: it has done nothing, so the task must be
# woken to take the delta. An awaitable: it has begun, and the task must await the rest before it
# does anything else for the stream.
Taken: TypeAlias = bool | Awaitable[None]
TokenCallback: TypeAlias = Callable[[TokenDelta], Taken]

# An ASGI extension of our server (`app/replica_port.py`): its `loop`, and `write`, which writes a
# part of a streamed body at once. Ray Serve and uvicorn would run four coroutines for each part,
# which do nothing else. False: it has written nothing, because the reply has not begun or has
# ended, or because the client reads too slowly or has gone.
WRITE_NOW = "disagg.write_now"
WriteNow: TypeAlias = Callable[[bytes], bool]


def begun(coroutine: Coroutine[Any, Any, None]) -> Taken:
    """Run a coroutine until it ends or waits for something. Returns True, or the rest of it."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return True
    return _Rest(coroutine, waits_for)


class _Rest:
    """The rest of a coroutine that waits for a future. A task continues it by awaiting this."""

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
