"""The process of a rank other than its worker's first rank.

`python -m disagg.worker.rank FD FD`, or `run_elsewhere` in a process on another node.

The main thread executes the tasks of the first rank in order: it computes steps, and starts to move
blocks (`Moves`). A second thread ends the process when the first rank is gone. `ranks` starts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from disagg import logs
from disagg.capacity.worker_steps import largest_step
from disagg.errors import DisaggError, TransferFailed
from disagg.imports import uncollected_imports
from disagg.kvtransfer.slab import Stamps
from disagg.kvtransfer.transport import PullDone, Transport
from disagg.models.description import describe_model
from disagg.rank_messages import (
    ConnectPeer,
    ForgetAdapter,
    ForgetPeer,
    FromRank,
    PullBlocks,
    RankAdapter,
    RankCache,
    RankCapture,
    RankCopies,
    RankDone,
    RankFailed,
    RankFetch,
    RankLoaded,
    RankMove,
    RankPut,
    RankReady,
    RankSlot,
    RankStart,
    RankStep,
    RankUp,
    decode_task,
    decode_to_rank,
    encode,
)
from disagg.store.block_copier import BlockCopier
from disagg.store.cold_tier import Block, Fetch, Put, StoreThread
from disagg.worker.parts import RankMemory, first_gpu
from disagg.worker.rank_listener import Address, connect_rank

if TYPE_CHECKING:  # needs torch
    from disagg.engine.device.follower import Follower

RUNNING_LOOK_S = 0.001  # between two checks of running moves
CLOSE_TIMEOUT_S = 3.0

log = logging.getLogger(__name__)


class _Pipes:
    """The pipes to the first rank.

    caches: what `listen` has received.
    is_following: the main thread executes tasks, and ends the process itself after the last.
    """

    def __init__(self, control: Connection, steps: Connection) -> None:
        self.control, self.steps = control, steps
        self.telling = threading.Lock()
        self.caches: SimpleQueue[RankCache] = SimpleQueue()
        self.is_following = False

    def tell(self, message: FromRank) -> None:
        """Send a message to the first rank, from any thread."""
        with self.telling, contextlib.suppress(OSError):  # `listen` notices if it is gone
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
        if self.is_following:
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
    threading.Thread(target=pipes.listen, name="listen", daemon=True).start()
    try:
        follower, moves = _started(start, pipes)
    except Exception as error:
        log.exception("Rank %d of %d cannot start.", start.rank, start.num_ranks)
        pipes.tell(RankFailed(error.message if isinstance(error, DisaggError) else repr(error)))
        _end(1)
    try:
        pipes.is_following = True
        follow(pipes.steps, follower, moves)
        moves.close()
        _end(0)
    except Exception as error:
        log.exception("Rank %d of %d failed.", start.rank, start.num_ranks)
        pipes.tell(RankFailed(repr(error)))
        _end(1)


def follow(steps: Connection, follower: Follower, moves: Moves) -> None:
    """Execute the tasks of the first rank in order, until it is gone."""
    while True:
        try:
            while moves.is_busy:
                moves.report()
                if steps.poll(RUNNING_LOOK_S):
                    break
            task = decode_task(steps.recv_bytes())
        except (EOFError, OSError):
            return
        if isinstance(task, RankStep | RankCapture | RankSlot):
            follower.follow(task)
        elif isinstance(task, RankAdapter | ForgetAdapter):
            follower.load_adapter(task, moves.tell)
        else:
            moves.begin(task)


def _started(start: RankStart, pipes: _Pipes) -> tuple[Follower, Moves]:
    """Load this rank's part of the model, and connect to the other ranks."""
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
    stamps = Stamps(cache.num_blocks, start.name, start.epoch)  # only the first rank's are read
    memory = RankMemory.build(start.config, engine, kv_cache, stamps)
    pipes.tell(RankReady(memory.transport.peer))
    store = memory.store
    moves = Moves(
        memory.transport,
        memory.copier,
        None if store is None else StoreThread(store, memory.slab.block_nbytes),
        memory.read_blocks,
        kv_cache.write_block,
        pipes.tell,
    )
    return follower, moves


class Moves:
    """Moves this rank's part of blocks: pulls, copies to host memory, and puts and fetches of the
    store. It is used by the thread that computes steps, so that moves and steps are in order.

    Args:
        copier: copies to host memory; None if there is no host tier.
        store: None if there is no store.
        read_blocks, write_block: see `Parts`.
        tell: sends a message to the first rank.
    """

    def __init__(
        self,
        transport: Transport,
        copier: BlockCopier | None,
        store: StoreThread | None,
        read_blocks: Callable[[Sequence[int]], Sequence[Block]],
        write_block: Callable[[int, bytes], None],
        tell: Callable[[FromRank], None],
    ) -> None:
        self._transport, self._copier, self._store = transport, copier, store
        self._read_blocks, self._write_block = read_blocks, write_block
        self.tell = tell
        # Numbers of running tasks; copies of a direction and puts end in order.
        self._pulls: dict[int, int] = {}  # by the pull's id here
        self._saves: deque[int] = deque()
        self._loads: deque[int] = deque()
        self._puts: deque[tuple[int, list[Put]]] = deque()
        self._fetches: dict[Fetch, RankFetch] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a task is running, whose end `report` will report."""
        return bool(self._pulls or self._saves or self._loads or self._puts or self._fetches)

    def begin(self, task: RankMove) -> None:
        match task:
            case PullBlocks():
                self._pull(task)
            case ConnectPeer(peer=peer):
                try:
                    self._transport.add_peer(peer)
                except TransferFailed as error:
                    log.warning("%s", error)
            case ForgetPeer(worker_id=worker_id):
                self._transport.forget_peer(worker_id)
            case RankCopies():
                self._copy(task)
            case RankPut():
                self._put(task)
            case RankFetch():
                self._fetch(task)

    def report(self) -> None:
        """Tell the first rank which tasks have ended."""
        for event in self._transport.poll() if self._pulls else ():
            if isinstance(event, PullDone):
                self.tell(RankDone.of_pull(self._pulls.pop(event.pull_id), event))
        if (self._saves or self._loads) and self._copier is not None:
            for _ in range(self._copier.take_saved()):
                self.tell(RankDone(self._saves.popleft()))
            for seconds in self._copier.take_loaded():
                self.tell(RankDone(self._loads.popleft(), seconds=seconds))
        for done in self._store.take_done() if self._store is not None else ():
            if isinstance(done, Fetch):
                self._fetched(done)
            elif done is self._puts[0][1][-1]:
                number, puts = self._puts.popleft()
                errors = (put.error for put in puts if put.error is not None)
                self.tell(RankDone(number, next(errors, None)))

    def close(self) -> None:
        """Close the transport, so that nothing is written to the memory any more."""
        self._transport.close()

    def _pull(self, task: PullBlocks) -> None:
        try:
            pull_id = self._transport.pull(task.ticket, task.first_block, task.into, releases=False)
        except TransferFailed as error:  # the first rank then computes the prompt instead
            log.warning("%s", error)
            self.tell(RankDone(task.number, error.message))
        else:
            self._pulls[pull_id] = task.number

    def _copy(self, copies: RankCopies) -> None:
        assert self._copier is not None, "all ranks have host memory, or none has"
        if copies.is_load:
            self._loads.append(copies.number)
            self._copier.load(copies.pairs)
        else:
            self._saves.append(copies.number)
            self._copier.save(copies.pairs)

    def _put(self, task: RankPut) -> None:
        assert self._store is not None, "all ranks have the store, or none has"
        places = [place for place, _ in task.blocks]
        blocks = self._read_slots(places) if task.in_host else self._read_blocks(places)
        puts = [
            Put(name, block, place, task.in_host)
            for (place, name), block in zip(task.blocks, blocks, strict=True)
        ]
        self._puts.append((task.number, puts))
        self._store.put(puts)

    def _read_slots(self, slots: Sequence[int]) -> list[bytes]:
        assert self._copier is not None, "all ranks have host memory, or none has"
        return [self._copier.read_slot(slot) for slot in slots]

    def _fetch(self, task: RankFetch) -> None:
        assert self._store is not None, "all ranks have the store, or none has"
        num_blocks = len(task.names)
        fetch = Fetch(tuple(task.names), lambda num_found: num_found == num_blocks)
        self._fetches[fetch] = task
        self._store.fetch(fetch)

    def _fetched(self, fetch: Fetch) -> None:
        """Write fetched blocks to the cache, if they are complete."""
        assert self._store is not None, "all ranks have the store, or none has"
        task, error = self._fetches.pop(fetch), fetch.error
        if error is None and len(fetch.blocks) < len(task.names):
            error = f"the store has only {fetch.num_found} of {len(task.names)} blocks left"
        if error is None:
            for block_id, block in zip(task.into, fetch.blocks, strict=True):
                self._write_block(block_id, block)
        self.tell(RankDone(task.number, error, num_damaged=self._store.num_damaged))


def _end(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)  # other threads may still run


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
