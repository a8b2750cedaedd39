"""A worker with a fake model in a process of its own: `python -m tests.worker.worker_process`.

Prints its record in hex. Answers every line on stdin with "empty" as soon as all of its blocks are
back and its books are right.
"""

from __future__ import annotations

import asyncio
import sys

from disagg.messages import encode
from tests.worker.rig import rig


async def main() -> None:
    loop = asyncio.get_running_loop()
    async with rig() as r:
        await r.start("decode", num_blocks=1024)
        r.runners["decode"].step_s = 0.002  # whoever wants to freeze an answer must be in time
        print(encode(r.workers["decode"].record).hex(), flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            await r.until_empty("decode")
            print("empty", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
