"""The process of a rank that is not its worker's first: `python -m disagg.worker.rank FD FD FD`.

The main thread computes steps. Another one reads what else the first rank says, and ends the
process when that one is gone; a third moves KV. Started by `ranks`.
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
from disagg.errors import DisaggError, TransferFailed
from disagg.kvtransfer.ranked_transport import QuietTransport
from disagg.kvtransfer.stamps import Stamps
from disagg.kvtransfer.transport import PullDone
from disagg.models.description import describe_model
from disagg.models.share import Share
from disagg.planner.step_sizes import largest_step
from disagg.rank_messages import (
    ConnectPeer,
    FromRank,
    PullBlocks,
    RankCache,
    RankCopied,
    RankCopies,
    RankFailed,
    RankLoaded,
    RankPulled,
    RankReady,
    RankStart,
    RankUp,
    decode_task,
    decode_to_rank,
    encode,
)
from disagg.store.block_copier import BlockCopier
from disagg.worker.parts import (
    first_gpu,
    new_copier,
    new_transport,
    num_host_blocks,
    slab_of,
)

if TYPE_CHECKING:  # needs torch
    from disagg.engine.device.follower import Follower

RUNNING_LOOK_S = 0.001  # between two checks of running pulls or copies
CLOSE_TIMEOUT_S = 3.0
Job: TypeAlias = ConnectPeer | PullBlocks | None  # None: the first rank is gone

log = logging.getLogger(__name__)


class _Pipes:
    """What connects this rank with the first one, and the threads of this process.

    jobs: for the thread that moves KV; None until there is one.
    """

    def __init__(self, control_fd: int, steps_fd: int, stamps_fd: int) -> None:
        self.control, self.steps = Connection(control_fd), Connection(steps_fd)
        self.stamps_fd = stamps_fd
        self._telling = threading.Lock()
        self.caches: SimpleQueue[RankCache] = SimpleQueue()
        self.jobs: SimpleQueue[Job] | None = None

    def tell(self, message: FromRank) -> None:
        """From any thread."""
        with self._telling, contextlib.suppress(OSError):  # it is gone, which ends `listen`
            self.control.send_bytes(encode(message))

    def listen(self) -> None:
        """Pass on what the first rank says, and end the process after it."""
        while True:
            try:
                message = decode_to_rank(self.control.recv_bytes())
            except (EOFError, OSError):
                break
            if isinstance(message, RankCache):
                self.caches.put(message)
            elif isinstance(message, ConnectPeer | PullBlocks) and self.jobs is not None:
                self.jobs.put(message)
        if self.jobs is not None:
            self.jobs.put(None)
            time.sleep(CLOSE_TIMEOUT_S)
        _end(0)


class _Offload:
    """This rank's part of the KV that its worker keeps in host memory.

    Args:
        copier: used by the thread that computes steps.
    """

    def __init__(self, copier: BlockCopier, tell: Callable[[FromRank], None]) -> None:
        self._copier, self._tell = copier, tell
        self.num_under_way = 0

    def copy(self, copies: RankCopies) -> None:
        (self._copier.load if copies.is_load else self._copier.save)(copies.pairs)
        self.num_under_way += 1

    def report(self) -> None:
        """Tell the first rank which copies have ended."""
        num_saved, loaded_s = self._copier.take_saved(), self._copier.take_loaded()
        if num_saved or loaded_s:
            self.num_under_way -= num_saved + len(loaded_s)
            self._tell(RankCopied(num_saved, loaded_s))


def main(control_fd: int, steps_fd: int, stamps_fd: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the whole server
    pipes = _Pipes(control_fd, steps_fd, stamps_fd)
    start = decode_to_rank(pipes.control.recv_bytes())
    assert isinstance(start, RankStart)
    logs.setup(start.worker_id)
    _start_thread("listen", pipes.listen)
    try:
        follower, offload = _started(start, pipes)
    except Exception as error:
        log.exception("Rank %d of %d could not start.", start.rank, start.num_ranks)
        pipes.tell(RankFailed(error.message if isinstance(error, DisaggError) else repr(error)))
        _end(1)
    try:
        _follow(pipes.steps, follower, offload)
    except EOFError:  # the worker closes; `listen` ends the process
        time.sleep(2 * CLOSE_TIMEOUT_S)
    except Exception:
        log.exception("Rank %d of %d ends.", start.rank, start.num_ranks)
    _end(1)


def _follow(steps: Connection, follower: Follower, offload: _Offload | None) -> NoReturn:
    """Do what the first rank says, in order. Raises `EOFError`: it is gone."""
    while True:
        while offload is not None and offload.num_under_way:
            offload.report()
            if steps.poll(RUNNING_LOOK_S):
                break
        task = decode_task(steps.recv_bytes())
        if not isinstance(task, RankCopies):
            follower.follow(task)
        elif offload is not None:
            offload.copy(task)


def _started(start: RankStart, pipes: _Pipes) -> tuple[Follower, _Offload | None]:
    """Load this rank's part, meet the others, and begin to move KV."""
    # Here, since torch takes seconds, in which the first rank may end.
    from disagg.engine.device.follower import Follower

    engine, model = start.tier.engine, describe_model(start.tier.directory)
    follower = Follower(
        engine,
        model,
        Share(start.rank, start.num_ranks),
        largest_step(engine, model, first_gpu(engine)),
        start.num_threads,
    )
    pipes.tell(RankUp())
    pipes.tell(RankLoaded(follower.load(start.meeting_place)))
    cache = pipes.caches.get()
    kv_cache = follower.allocate(cache.num_blocks, cache.max_num_seqs)
    slab, offload = slab_of(kv_cache), None
    num_slots = num_host_blocks(engine, slab.block_nbytes * start.num_ranks)
    if num_slots:
        offload = _Offload(new_copier(kv_cache, slab, num_slots), pipes.tell)
    transport = new_transport(
        start.config,
        start.worker_id,
        start.epoch,
        slab,
        Stamps.in_shared_memory(pipes.stamps_fd, cache.num_blocks),
        None,
        kv_cache.begin_thread,
    )
    jobs: SimpleQueue[Job] = SimpleQueue()
    pipes.jobs = jobs
    _start_thread("move", partial(_move, transport, jobs, pipes.tell))
    pipes.tell(RankReady(transport.peer))
    return follower, offload


def _move(
    transport: QuietTransport, jobs: SimpleQueue[Job], tell: Callable[[FromRank], None]
) -> None:
    """Pull this rank's part of blocks; in a thread of its own, which alone uses the transport."""
    running: dict[int, int] = {}  # number of the first rank, by the pull's id here
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
    transport: QuietTransport,
    job: ConnectPeer | PullBlocks,
    running: dict[int, int],
    tell: Callable[[FromRank], None],
) -> None:
    try:
        if isinstance(job, ConnectPeer):
            transport.add_peer(job.peer)
            return
        pull_id = transport.pull(job.ticket, job.first_block, job.into, releases=False)
        running[pull_id] = job.number
    except TransferFailed as error:
        log.warning("%s", error)
        if isinstance(job, PullBlocks):  # the prompt is computed instead
            tell(RankPulled(job.number, PullDone(0, error.message, 0, 0, 0.0)))


def _start_thread(name: str, target: Callable[[], None]) -> None:
    """Start a thread that ends the process if it fails: without it pulls would never end."""

    def run() -> None:
        try:
            target()
        except Exception:
            log.exception("The thread %r of a rank failed.", name)
            _end(1)

    threading.Thread(target=run, name=name, daemon=True).start()


def _end(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)  # threads may be in the middle of anything


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
