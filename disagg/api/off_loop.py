"""Runs the work on large requests in threads instead of on the event loop.

The event loop writes all streams of this process, so they would all wait for a large request. Work
on small requests stays on the loop, because a thread switch would take longer than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

INLINE_NBYTES = 64 << 10  # work on a larger input goes to a thread

# Threads share the interpreter lock with the loop: each busy thread delays it by up to 5 ms.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large-request")


async def off_loop(nbytes: int, work: Callable[[], Result]) -> Result:
    """Run `work`, which reads `nbytes` of input, and return its result. Raises its exceptions.

    At most two large pieces of work run at a time. If the caller is cancelled, waiting work is
    never started, and running work runs to its end.
    """
    if nbytes <= INLINE_NBYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
