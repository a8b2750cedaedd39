"""Asks a server until it answers: waits while it is full, and while it cannot be reached."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from disagg.batch.lines import BatchReply
from disagg.errors import Unavailable

# Path and body -> the reply. Raises `Unavailable` if there is none.
Ask: TypeAlias = Callable[[str, bytes], Awaitable[BatchReply]]

BATCH_HEADERS = {  # batch work: without SLOs, and behind all requests that have some
    "content-type": "application/json",
    "x-slo-ttft-ms": "none",
    "x-slo-tpot-ms": "none",
}
FULL = (429, 503)  # the server is full, or has no worker at the moment
MAX_NUM_LATE = 3  # tries of a request that reaches its deadline (504), in a queue or by itself
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
GIVE_UP_S = 300.0  # after so many seconds without a reply to anybody


class Patience:
    """An `Ask` that tries again what was refused because the server is full, or has failed.

    Attributes:
        once: asks without trying again.
        num_waiting: requests that wait to be tried again.
    """

    def __init__(
        self,
        ask: Ask,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.once = ask
        self._clock = clock
        self._sleep = sleep
        self._heard_s = clock()
        self.num_waiting = 0

    async def __call__(self, path: str, body: bytes) -> BatchReply:
        """Raises `Unavailable` when the server was silent for `GIVE_UP_S`."""
        num_late, pause_s = 0, FIRST_PAUSE_S
        while True:
            try:
                reply = await self.once(path, body)
            except Unavailable:
                if self._clock() - self._heard_s > GIVE_UP_S:
                    raise
                await self._wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self._heard_s = self._clock()
            num_late += reply.status == 504
            is_full = reply.status in FULL and reply.headers.get("x-should-retry") != "false"
            if not is_full and (reply.status != 504 or num_late >= MAX_NUM_LATE):
                return reply
            await self._wait(_asked_pause_s(reply) or FIRST_PAUSE_S)

    async def _wait(self, pause_s: float) -> None:
        self.num_waiting += 1
        try:
            await self._sleep(pause_s * random.uniform(1.0, 1.5))  # not all at once
        finally:
            self.num_waiting -= 1


def _asked_pause_s(reply: BatchReply) -> float | None:
    try:
        return min(float(reply.headers.get("retry-after", "")), LONGEST_PAUSE_S)
    except ValueError:
        return None
