"""Runs work that grows with the size of a request in a few threads instead of on the event loop.

The event loop writes every stream of this process, so all streams would wait for one large request.
Small work stays on the loop, because a thread switch would cost more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

INLINE_NBYTES = 64 << 10  # of input; more than this goes to a thread

# Threads share one interpreter lock with the loop: each that computes delays it by up to 5 ms.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large-request")


async def off_loop(nbytes: int, work: Callable[[], Result]) -> Result:
    """Run `work`, which reads `nbytes` of input, and return its result. Raises its exceptions.

    Two large ones run at a time, others wait. If its caller is cancelled, work that waits is never
    started, and running work runs to its end.
    """
    if nbytes <= INLINE_NBYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
