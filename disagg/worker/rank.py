"""The process of a rank other than its worker's first rank.

`python -m disagg.worker.rank FD FD`, or `run_elsewhere` in a process on another node.

The main thread executes the tasks of the first rank in order: it computes steps and starts KV
transfers. A second thread ends the process when the first rank is gone; a third one pulls KV.
`ranks` starts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from disagg import logs
from disagg.capacity.step_sizes import largest_step
from disagg.errors import DisaggError, TransferFailed
from disagg.imports import uncollected_imports
from disagg.kvtransfer.stamps import Stamps
from disagg.kvtransfer.transport import PullDone, Transport
from disagg.models.description import describe_model
from disagg.rank_messages import (
    ConnectPeer,
    ForgetPeer,
    FromRank,
    PullBlocks,
    RankCache,
    RankCapture,
    RankFailed,
    RankLoaded,
    RankPulled,
    RankReady,
    RankStart,
    RankStep,
    RankUp,
    decode_task,
    decode_to_rank,
    encode,
)
from disagg.store.store_thread import StoreThread
from disagg.worker.parts import (
    first_gpu,
    new_copier,
    new_reader,
    new_transport,
    num_host_blocks,
    slab_of,
    store_of,
)
from disagg.worker.rank_listener import Address, connect_rank
from disagg.worker.rank_offload import Offload

if TYPE_CHECKING:  # needs torch
    from disagg.engine.device.follower import Follower

RUNNING_LOOK_S = 0.001  # between two checks of running transfers
CLOSE_TIMEOUT_S = 3.0
Job: TypeAlias = ConnectPeer | ForgetPeer | PullBlocks | None  # None if the first rank is gone

log = logging.getLogger(__name__)


class _Pipes:
    """The pipes to the first rank, and the queues between the threads of this process.

    jobs: jobs of the thread that pulls KV; None until it runs.
    """

    def __init__(self, control: Connection, steps: Connection) -> None:
        self.control, self.steps = control, steps
        self._telling = threading.Lock()
        self.caches: SimpleQueue[RankCache] = SimpleQueue()
        self.jobs: SimpleQueue[Job] | None = None

    def tell(self, message: FromRank) -> None:
        """Send a message to the first rank, from any thread."""
        with self._telling, contextlib.suppress(OSError):  # `listen` notices if it is gone
            self.control.send_bytes(encode(message))

    def listen(self) -> None:
        """Read messages until the first rank ends, and then end this process."""
        while True:
            try:
                message = decode_to_rank(self.control.recv_bytes())
            except (EOFError, OSError):
                break
            if isinstance(message, RankCache):
                self.caches.put(message)
        if self.jobs is not None:
            self.jobs.put(None)
            time.sleep(CLOSE_TIMEOUT_S)
        _end(0)


def main(control_fd: int, steps_fd: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the command
    pipes = _Pipes(Connection(control_fd), Connection(steps_fd))
    start = decode_to_rank(pipes.control.recv_bytes())
    assert isinstance(start, RankStart)
    _run(start, pipes)


def run_elsewhere(start: RankStart, listener: Address) -> NoReturn:
    """Run a rank on another node than the first rank's, in the main thread of a process.

    Raises:
        StartupError: it cannot connect to the first rank.
    """
    key = start.config.cluster_key.encode()
    _run(start, _Pipes(*connect_rank(listener, key, start.worker_id, start.rank)))


def _run(start: RankStart, pipes: _Pipes) -> NoReturn:
    logs.setup(start.name)
    _start_thread("listen", pipes.listen)
    try:
        follower, offload, jobs = _started(start, pipes)
    except Exception as error:
        log.exception("Rank %d of %d cannot start.", start.rank, start.num_ranks)
        pipes.tell(RankFailed(error.message if isinstance(error, DisaggError) else repr(error)))
        _end(1)
    try:
        _follow(pipes.steps, follower, offload, jobs)
    except EOFError:  # the worker closes, and `listen` ends the process
        time.sleep(2 * CLOSE_TIMEOUT_S)
    except Exception as error:
        log.exception("Rank %d of %d failed.", start.rank, start.num_ranks)
        pipes.tell(RankFailed(repr(error)))
    _end(1)


def _follow(
    steps: Connection, follower: Follower, offload: Offload, jobs: SimpleQueue[Job]
) -> NoReturn:
    """Execute the tasks of the first rank in order. Raises `EOFError` when it is gone."""
    while True:
        while offload.is_busy:
            offload.report()
            if steps.poll(RUNNING_LOOK_S):
                break
        task = decode_task(steps.recv_bytes())
        match task:
            case RankStep() | RankCapture():
                follower.follow(task)
            case ConnectPeer() | ForgetPeer() | PullBlocks():
                # They are queued in order with other tasks, which may read the blocks before.
                jobs.put(task)
            case _:
                offload.begin(task)


def _started(start: RankStart, pipes: _Pipes) -> tuple[Follower, Offload, SimpleQueue[Job]]:
    """Load this rank's part of the model, connect to the other ranks, and start the threads."""
    # Imported here because it takes seconds, during which `listen` must already run.
    with uncollected_imports():
        from disagg.engine.device.follower import Follower

    engine, model = start.tier.engine, describe_model(start.tier.directory)
    follower = Follower(
        engine,
        model,
        engine.share(start.rank),
        largest_step(engine, model, first_gpu(engine)),
        start.num_threads,
    )
    pipes.tell(RankUp())
    pipes.tell(RankLoaded(follower.load(start.meeting_place, start.host)))
    cache = pipes.caches.get()
    kv_cache = follower.allocate(cache.num_blocks, cache.max_num_seqs)
    slab = slab_of(kv_cache)
    num_slots = num_host_blocks(engine, slab.block_nbytes * start.num_ranks)
    store = store_of(start.config, engine, kv_cache)
    reader = new_reader(kv_cache, slab) if store is not None else None
    offload = Offload(
        new_copier(kv_cache, slab, num_slots) if num_slots else None,
        None if store is None else StoreThread(store, slab.block_nbytes, time.monotonic),
        reader or kv_cache.read_blocks,
        kv_cache.write_block,
        pipes.tell,
    )
    transport = new_transport(
        start.config,
        start.name,
        start.epoch,
        slab,
        Stamps(cache.num_blocks, start.name, start.epoch),  # only the first rank's are ever read
        None,
        kv_cache.begin_thread,
        reader.wait if reader is not None else lambda: None,
    )
    jobs: SimpleQueue[Job] = SimpleQueue()
    pipes.jobs = jobs
    _start_thread("move", partial(_move, transport, jobs, pipes.tell))
    pipes.tell(RankReady(transport.peer))
    return follower, offload, jobs


def _move(transport: Transport, jobs: SimpleQueue[Job], tell: Callable[[FromRank], None]) -> None:
    """Pull this rank's part of blocks, in the only thread that uses the transport."""
    running: dict[int, int] = {}  # the first rank's number of each pull, by its id here
    while True:
        with contextlib.suppress(queue.Empty):
            job = jobs.get(timeout=RUNNING_LOOK_S if running else None)
            if job is None:
                transport.close()
                _end(0)
            _begin(transport, job, running, tell)
        for event in transport.poll() if running else ():
            if isinstance(event, PullDone):
                tell(RankPulled(running.pop(event.pull_id), event))


def _begin(
    transport: Transport,
    job: ConnectPeer | ForgetPeer | PullBlocks,
    running: dict[int, int],
    tell: Callable[[FromRank], None],
) -> None:
    try:
        if isinstance(job, ConnectPeer):
            transport.add_peer(job.peer)
            return
        if isinstance(job, ForgetPeer):
            transport.forget_peer(job.worker_id)
            return
        pull_id = transport.pull(job.ticket, job.first_block, job.into, releases=False)
        running[pull_id] = job.number
    except TransferFailed as error:
        log.warning("%s", error)
        if isinstance(job, PullBlocks):  # the first rank then computes the prompt instead
            tell(RankPulled(job.number, PullDone(0, error.message, 0, 0, 0.0)))


def _start_thread(name: str, target: Callable[[], None]) -> None:
    """Start a thread that ends the process if it fails, because pulls would never end."""

    def run() -> None:
        try:
            target()
        except Exception:
            log.exception("The thread %r of a rank failed.", name)
            _end(1)

    threading.Thread(target=run, name=name, daemon=True).start()


def _end(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)  # other threads may still run


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
