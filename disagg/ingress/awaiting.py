"""Requests that wait until their model has a worker, in order of arrival.

The fleet calls back when a worker appears, so nothing polls.
"""

from __future__ import annotations

import asyncio
from collections import deque

from disagg.router.fleet import Fleet


class AwaitingWorkers:
    """Wakes one request at a time.

    A woken request calls `wake` after it is routed or has given up. Only then the next one is
    woken, so that it sees a fleet in which the first one is already counted.

    Args:
        fleet: the fleet in which workers appear.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by model
        fleet.on_available.append(self.wake)

    def has_worker(self, model: str) -> bool:
        return self._fleet.view().num_accepting(model) > 0

    def wake(self, model: str) -> None:
        """Wake the first request that still waits."""
        waiting = self._waiting.get(model)
        while waiting:
            first = waiting.popleft()
            if not first.done():
                first.set_result(None)
                return

    async def wait(self, model: str, timeout_s: float, *, again: bool) -> None:
        """Return when `model` may have a worker, or after `timeout_s`.

        Args:
            again: whether the request was woken before and found no worker; it keeps its place.
        """
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(model, deque())
        if again:
            waiting.appendleft(woken)
        else:
            waiting.append(woken)
        is_cancelled = True
        try:
            await asyncio.wait([woken], timeout=timeout_s)
            is_cancelled = False
        finally:
            if not woken.done():
                waiting.remove(woken)
            elif is_cancelled:
                self.wake(model)  # this request was woken but is cancelled, so wake the next one
            if not waiting and self._waiting.get(model) is waiting:
                del self._waiting[model]
