"""The two servers of `bench.ingress_alone`, each a process that runs until it is killed.

    python -P bench/ingress_processes.py worker GATE     # prints its record
    python -P bench/ingress_processes.py ingress RECORD  # prints the port of its HTTP

`python -P` and a PYTHONPATH choose the files that are measured, which may be those of an older
commit. Event loop and HTTP server are those of a Ray Serve replica.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import select
import sys
import time

import msgspec
import uvicorn
import uvloop

from bench.paced_worker import paced_parts
from bench.serving_cluster import config_for
from disagg.config import ServeConfig, TierConfig
from disagg.messages import WorkerRecord, encode
from disagg.worker import worker as worker_module
from disagg.worker.parts import Parts

try:
    from disagg.ingress.core import IngressCore
except ImportError:  # an older commit
    from disagg.api.ingress import IngressCore  # type: ignore[import-not-found,no-redef]

HOLD, STEP, FREE = b"h", b"s", b"f"  # what the gate is told
PATIENT_S = 3600.0
# Steps that are held up look slow to the router, which must not refuse requests for that.
CONFIG = msgspec.structs.replace(
    config_for(port=0),
    tiers=tuple(
        msgspec.structs.replace(tier, ttft_slo_s=PATIENT_S) for tier in config_for(port=0).tiers
    ),
)
POLL_S = 0.01


class Gate:
    """Takes the place of a step's sleep: holds steps up until the bench lets them through.

    Args:
        fd: of a pipe. `HOLD`: no step ends from now on; `STEP`: one does; `FREE`: all do again.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_free = True

    def sleep(self, seconds: float) -> None:
        if self._is_free and not select.select([self._fd], [], [], 0)[0]:
            time.sleep(seconds)
            return
        while (told := os.read(self._fd, 1)) == HOLD:
            self._is_free = False
        self._is_free |= told == FREE


async def serve_worker(gate: Gate) -> None:
    def gated_parts(
        config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int, progress: object = None
    ) -> Parts:
        parts = paced_parts(config, tier, worker_id, epoch)
        parts.engine.runner._sleep = gate.sleep  # type: ignore[attr-defined]
        return parts

    worker_module.LOOK_S = PATIENT_S  # type: ignore[attr-defined]  # steps are held up on purpose
    worker = await worker_module.Worker.start(
        CONFIG,
        CONFIG.tiers[0],
        "decode",
        worker_id="bench",
        epoch=time.time_ns(),
        host="127.0.0.1",
        build=gated_parts,
    )
    gc.freeze()
    print(base64.b64encode(encode(worker.record)).decode(), flush=True)
    await asyncio.Event().wait()


async def serve_ingress(record: WorkerRecord) -> None:
    core = IngressCore(CONFIG, "bench")
    core.update([record])
    if not await core.wait_ready(30.0):
        raise SystemExit("the ingress has no worker")
    server = uvicorn.Server(uvicorn.Config(core.app, port=0, log_level="error", access_log=False))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    gc.freeze()
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


def main() -> None:
    role, given = sys.argv[1:]
    if role == "worker":
        uvloop.run(serve_worker(Gate(int(given))))
    else:
        record = msgspec.msgpack.decode(base64.b64decode(given), type=WorkerRecord)
        uvloop.run(serve_ingress(record))


if __name__ == "__main__":
    main()
