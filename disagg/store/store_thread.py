"""The thread that makes the blocking calls to a `ColdStore`.

Jobs and results pass through queues; nothing else is shared. Fetches go before puts, because a
request may wait for a fetch, but never for a put.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeAlias

from disagg.blocks import BlockHash
from disagg.errors import Unavailable
from disagg.store.store import ColdStore

_CALL_NBYTES = 4 << 20  # approximate size of one call; a fetch waits for one call at most


@dataclass(slots=True)
class FetchJob:
    """Load the longest stored prefix of `hashes` if `worth`, called with its length, is true."""

    fetch_id: int
    hashes: tuple[BlockHash, ...]
    worth: Callable[[int], bool]
    cancelled: bool = False  # set by the submitting thread


# Bytes, or a function that the store's thread calls to get them; it may wait for a device.
Block: TypeAlias = bytes | Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class PutJob:
    """Store a block.

    number: number of the block in the cache or, if `in_host`, of its slot in host memory. Other
        ranks find their parts of the block with it.
    """

    block_hash: BlockHash
    block: Block
    number: int
    in_host: bool = False


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline_s: float


@dataclass(slots=True)
class FetchDone:
    fetch_id: int
    num_found: int = 0  # length of the leading run in the store
    blocks: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PutsDone:
    block_hashes: tuple[BlockHash, ...]
    nbytes: int
    error: str | None


Done: TypeAlias = FetchDone | PutsDone


class StoreThread:
    """Runs the calls to a store, and closes it at the end.

    Args:
        store: used by this thread only from now on.
        block_nbytes: size of every block; values of another size are not accepted.
    """

    def __init__(
        self,
        store: ColdStore,
        block_nbytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self.block_nbytes = block_nbytes
        self._num_per_call = max(1, _CALL_NBYTES // block_nbytes)
        self._clock = clock
        self._inbox: SimpleQueue[FetchJob | PutJob | _Stop] = SimpleQueue()
        self._outbox: SimpleQueue[Done] = SimpleQueue()
        self._fetches: deque[FetchJob] = deque()
        self._puts: deque[PutJob] = deque()
        self._stop: _Stop | None = None
        self._thread = threading.Thread(target=self._run, name="cold-tier", daemon=True)
        self._thread.start()

    @property
    def num_damaged(self) -> int:
        """The number of damaged values that were read so far."""
        return self._store.num_damaged

    def fetch(self, job: FetchJob) -> None:
        self._inbox.put(job)

    def put(self, jobs: Sequence[PutJob]) -> None:
        for job in jobs:
            self._inbox.put(job)

    def take_done(self) -> list[Done]:
        """The jobs that ended since the last call. Never waits."""
        done: list[Done] = []
        while True:
            try:
                done.append(self._outbox.get_nowait())
            except Empty:
                return done

    def close(self, timeout_s: float) -> bool:
        """Process submitted jobs for at most `timeout_s`. Returns False if a call still hangs."""
        self._inbox.put(_Stop(self._clock() + timeout_s))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._take_jobs():
            if self._fetches:
                self._outbox.put(self._fetch(self._fetches.popleft()))
            elif self._puts:
                num = min(len(self._puts), self._num_per_call)
                self._outbox.put(self._put([self._puts.popleft() for _ in range(num)]))
        self._store.close()

    def _take_jobs(self) -> bool:
        """Take all submitted jobs, and wait for one if idle. Returns False at the end."""
        try:
            while True:
                idle = not (self._fetches or self._puts or self._stop)
                job = self._inbox.get(block=idle)
                if isinstance(job, FetchJob):
                    self._fetches.append(job)
                elif isinstance(job, PutJob):
                    self._puts.append(job)
                else:
                    self._stop = job
        except Empty:
            pass
        if self._stop is None:
            return True
        return bool(self._fetches or self._puts) and self._clock() < self._stop.deadline_s

    def _fetch(self, job: FetchJob) -> FetchDone:
        done = FetchDone(job.fetch_id)
        start_s = self._clock()
        try:
            if not job.cancelled:
                done.num_found = self._store.contains_prefix(job.hashes)
            if done.num_found and job.worth(done.num_found):
                self._load(job, done)
        except Unavailable as error:
            done.error = error.message
        except Exception as error:  # a bug in a store must not end the worker
            done.error = f"{type(error).__name__}: {error}"
        done.seconds = self._clock() - start_s
        return done

    def _load(self, job: FetchJob, done: FetchDone) -> None:
        for start in range(0, done.num_found, self._num_per_call):
            if job.cancelled:
                return
            hashes = job.hashes[start : min(start + self._num_per_call, done.num_found)]
            for block in self._store.get_many(hashes):
                if block is None or len(block) != self.block_nbytes:
                    done.num_found = len(
                        done.blocks
                    )  # the rest was evicted meanwhile or is damaged
                    return
                done.blocks.append(block)

    def _put(self, jobs: Sequence[PutJob]) -> PutsDone:
        error: str | None = None
        try:
            self._store.put_many([(job.block_hash, self._read(job.block)) for job in jobs])
        except Unavailable as unavailable:
            error = unavailable.message
        except Exception as bug:  # a bug in a store must not end the worker
            error = f"{type(bug).__name__}: {bug}"
        hashes = tuple(job.block_hash for job in jobs)
        return PutsDone(hashes, len(jobs) * self.block_nbytes, error)

    def _read(self, block: Block) -> bytes:
        read = block if isinstance(block, bytes) else block()
        if len(read) != self.block_nbytes:
            raise ValueError(f"a block must have {self.block_nbytes} bytes, not {len(read)}")
        return read
