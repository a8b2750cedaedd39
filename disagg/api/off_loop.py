"""Where the work of a request runs that grows with its size: a few threads, not the event loop.

Every stream of this process is written by that loop, so what one request needs for long, all of
them would wait for. Little work stays on it: handing it over would cost more than doing it.
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
    """`work()`, of which `nbytes` of input are read; raises what it raises.

    Two large ones run at a time, others wait. One that nobody waits for any more is not begun; one
    that has begun runs to its end.
    """
    if nbytes <= INLINE_NBYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
