"""The cold KV tier: evicted blocks are stored outside of the worker (in Redis) and loaded again.

`ColdTier` is used by the engine's thread only, and no method waits: `StoreThread` makes the network
calls. Every failure is a cache miss: blocks that are lost, late or damaged are computed.

After a failure the store counts as unreachable until it has answered a probe. No request waits for
the probe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from msgspec.structs import replace

from disagg.blocks import BlockHash
from disagg.errors import Unavailable
from disagg.messages import StoreCounts
from disagg.store.block_copier import drained
from disagg.time_model import TransferTimeModel

log = logging.getLogger(__name__)

STORE_ID = "store"  # its source id in a `TransferTimeModel`

_STALE_S = 60.0  # measured times expire after this time, so that a slow store is tried again

_MAX_KNOWN = 32768  # largest number of remembered hashes, about 200 bytes each

_CALL_NBYTES = 4 << 20  # approximate size of one call; a fetch waits for one call at most
_QUEUE_NBYTES = 64 << 20  # usual limit of blocks that wait to be stored
_FETCH_NBYTES = 256 << 20  # usual limit of blocks that are being fetched
# The last two limits have at least this many blocks, however large these are, because a prompt
# evicts many blocks at once and needs all of them.
_NUM_QUEUED_BLOCKS = 64
_NUM_FETCHED_BLOCKS = 128


def num_queueable(block_nbytes: int) -> int:
    """Largest number of blocks that wait to be stored: 64 MiB, or 64 blocks if that is more."""
    return max(_QUEUE_NBYTES // block_nbytes, _NUM_QUEUED_BLOCKS)


class ColdStore(Protocol):
    """Blocks of one KV layout by hash. It is used by one thread, and may wait for a network.

    Each rank of a worker has its own store, which puts and gets the rank's part of each block.
    Stores with different layouts never share blocks, even on one server. The caller limits the
    bytes of a call. A store is a cache: lost blocks are computed again. While it is unreachable,
    every method except `close` raises `errors.Unavailable`, at once or within its time limit.
    """

    num_damaged: int  # number of values that were read with a wrong digest

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """The bytes under each key, or None if they are missing or damaged."""
        ...

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        """Store blocks. The least recently used ones are evicted first."""
        ...

    def contains(self, keys: Sequence[BlockHash]) -> list[bool]:
        """Which keys all ranks have stored. They may be evicted at any time."""
        ...

    def close(self) -> None: ...


# Bytes, or a function that the store's thread calls to get them; it may wait for a device.
Block: TypeAlias = bytes | Callable[[], bytes]


@dataclass(slots=True, eq=False)
class Fetch:
    """A lookup of the longest stored prefix of `hashes`.

    Its results belong to the store's thread until `ColdTier.poll` sets `done`, and do not change
    after that.

    worth: called in the store's thread with `num_found`; if false, no blocks are loaded.
    ends: after how many blocks a prefix is of use, ascending, with the name of what must be stored
        beside them; empty: after any.
    is_cancelled: set by the submitting thread.
    num_found: leading blocks in the store, loaded or not.
    blocks: the blocks of `hashes[:len(blocks)]`.
    seconds: time in the store, without the time in the queue.
    error: why blocks may be missing.
    """

    hashes: tuple[BlockHash, ...]
    worth: Callable[[int], bool]
    ends: Sequence[tuple[int, BlockHash]] = ()
    is_cancelled: bool = False
    done: bool = False
    num_found: int = 0
    blocks: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


@dataclass(slots=True, eq=False)
class Put:
    """A block to store.

    number: that of the block in the cache or, if `in_host`, of its slot in host memory. Other
        ranks find their parts of the block with it.
    error: why it was not stored.
    """

    block_hash: BlockHash
    block: Block
    number: int
    in_host: bool = False
    error: str | None = None


class StoreThread:
    """Makes the blocking calls to a store in a thread of its own, and closes it at the end.

    Jobs come back with their results; until then the thread owns them. Fetches go before puts,
    because a request may wait for a fetch, but never for a put.

    Args:
        store: used by this thread only from now on.
        block_nbytes: size of every block; values of another size are not accepted.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, store: ColdStore, block_nbytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self.block_nbytes = block_nbytes
        self._num_per_call = max(1, _CALL_NBYTES // block_nbytes)
        self._clock = clock
        self._inbox: SimpleQueue[Fetch | Put | None] = SimpleQueue()  # None: `close` was called
        self._outbox: SimpleQueue[Fetch | Put] = SimpleQueue()
        self._fetches: deque[Fetch] = deque()
        self._puts: deque[Put] = deque()
        self._is_closing = False
        self._close_by_s = 0.0
        self._thread = threading.Thread(target=self._run, name="cold-tier", daemon=True)
        self._thread.start()

    @property
    def num_damaged(self) -> int:
        """The number of damaged values that were read so far."""
        return self._store.num_damaged

    def fetch(self, fetch: Fetch) -> None:
        self._inbox.put(fetch)

    def put(self, puts: Sequence[Put]) -> None:
        for put in puts:
            self._inbox.put(put)

    def take_done(self) -> list[Fetch | Put]:
        """The jobs that ended since the last call. Never waits."""
        return drained(self._outbox)

    def close(self, timeout_s: float) -> bool:
        """Process submitted jobs for at most `timeout_s`. Returns False if a call still hangs."""
        self._close_by_s = self._clock() + timeout_s
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._take_jobs():
            if self._fetches:
                fetch = self._fetches.popleft()
                self._fetch(fetch)
                self._outbox.put(fetch)
            elif self._puts:
                num = min(len(self._puts), self._num_per_call)
                puts = [self._puts.popleft() for _ in range(num)]
                self._put(puts)
                for put in puts:
                    self._outbox.put(put)
        self._store.close()

    def _take_jobs(self) -> bool:
        """Take all submitted jobs, and wait for one if idle. Returns False at the end."""
        try:
            while True:
                is_idle = not (self._fetches or self._puts or self._is_closing)
                job = self._inbox.get(block=is_idle)
                if isinstance(job, Fetch):
                    self._fetches.append(job)
                elif isinstance(job, Put):
                    self._puts.append(job)
                else:
                    self._is_closing = True
        except Empty:
            pass
        if not self._is_closing:
            return True
        return bool(self._fetches or self._puts) and self._clock() < self._close_by_s

    def _fetch(self, fetch: Fetch) -> None:
        start_s = self._clock()
        try:
            if not fetch.is_cancelled:
                found = self._store.contains(fetch.hashes)
                fetch.num_found = [*found, False].index(False)
                if fetch.ends:
                    fetch.num_found = self._last_end(fetch)
            if fetch.num_found and fetch.worth(fetch.num_found):
                self._load(fetch)
        except Exception as error:  # a bug in a store must not end the worker
            fetch.error = _sentence(error)
        fetch.seconds = self._clock() - start_s

    def _last_end(self, fetch: Fetch) -> int:
        """The most of the blocks that were found after which the prefix is of use."""
        reached = [each for each in fetch.ends if each[0] <= fetch.num_found]
        found = self._store.contains([name for _, name in reached])
        return max(
            (num for (num, _), is_stored in zip(reached, found, strict=True) if is_stored),
            default=0,
        )

    def _load(self, fetch: Fetch) -> None:
        for start in range(0, fetch.num_found, self._num_per_call):
            if fetch.is_cancelled:
                return
            end = min(start + self._num_per_call, fetch.num_found)
            for block in self._store.get_many(fetch.hashes[start:end]):
                if block is None or len(block) != self.block_nbytes:
                    # The rest was evicted meanwhile or is damaged.
                    fetch.num_found = len(fetch.blocks)
                    return
                fetch.blocks.append(block)

    def _put(self, puts: Sequence[Put]) -> None:
        try:
            self._store.put_many([(put.block_hash, self._read(put.block)) for put in puts])
        except Exception as error:  # a bug in a store must not end the worker
            for put in puts:
                put.error = _sentence(error)
        for put in puts:
            put.block = b""  # its memory is free before the job comes back

    def _read(self, block: Block) -> bytes:
        read = block if isinstance(block, bytes) else block()
        if len(read) != self.block_nbytes:
            raise ValueError(f"a block must have {self.block_nbytes} bytes, not {len(read)}")
        return read


def _sentence(error: Exception) -> str:
    return error.message if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"


class ColdTier:
    """One worker's access to the store.

    Args:
        thread: makes the calls to the store; `close` closes it. With several ranks, it has the
            first rank's part of each block.
        times: learns the store's latency and rate under the source `STORE_ID`.
        clock: returns monotonic seconds.

    Attributes:
        stats: counts since the start, without damaged blocks.
        queued_nbytes: of blocks that wait to be stored.
    """

    def __init__(
        self,
        thread: StoreThread,
        times: TransferTimeModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._block_nbytes = thread.block_nbytes
        self._times = times
        self._clock = clock
        self._observed_s = clock()
        self._num_queueable = num_queueable(self._block_nbytes)
        # Blocks that are being fetched or wait for `poll`.
        self._num_fetchable = max(_FETCH_NBYTES // self._block_nbytes, _NUM_FETCHED_BLOCKS)
        self._under_way: list[Fetch] = []
        self._ended: list[Fetch] = []
        self._closed = False
        self._is_away = False
        self._known: OrderedDict[BlockHash, None] = OrderedDict()
        self.stats = StoreCounts()
        self.queued_nbytes = 0

    @property
    def num_under_way(self) -> int:
        """Number of lookups that `poll` has not reported. While there are any, poll often."""
        return len(self._under_way) + len(self._ended)

    @property
    def is_away(self) -> bool:
        """Whether the last call to the store failed. No request should then wait for it."""
        self._take_done()
        return self._is_away

    def offer(
        self,
        blocks: Sequence[tuple[int, BlockHash]],
        read: Callable[[list[int]], Sequence[Block]],
        *,
        in_host: bool = False,
    ) -> int:
        """Store copies of evicted blocks that the store does not have, if the queue has room.

        Returns the number of blocks that will be stored.

        Args:
            blocks: hashes of blocks, each with its number in the cache or, if `in_host`, its slot.
            read: called once with the numbers of the blocks to store, if there are any; returns
                their bytes, or functions that return these in the store's thread.
        """
        self._take_done()  # only once, because it polls every rank
        before_nbytes = self.queued_nbytes
        to_store: list[tuple[int, BlockHash]] = []
        for each in blocks:
            if self._should_store(each[1]):
                self.queued_nbytes += self._block_nbytes
                to_store.append(each)
        if not to_store:
            return 0
        try:
            found = read([number for number, _ in to_store])
            for block in found:
                if isinstance(block, bytes) and len(block) != self._block_nbytes:
                    nbytes = len(block)
                    raise ValueError(f"a block must have {self._block_nbytes} bytes, not {nbytes}")
        except BaseException:
            self.queued_nbytes = before_nbytes
            raise
        self._thread.put(
            [
                Put(block_hash, block, number, in_host)
                for (number, block_hash), block in zip(to_store, found, strict=True)
            ]
        )
        return len(to_store)

    def predicted_s(self, num_blocks: int) -> float:
        """Predicted seconds to load `num_blocks` blocks, from recent loads or the prior."""
        if self._clock() - self._observed_s > _STALE_S:
            self._times.forget(STORE_ID)
        return self._times.transfer_s(STORE_ID, num_blocks * self._block_nbytes)

    def lookup(
        self,
        hashes: Sequence[BlockHash],
        compute_s: Callable[[int], float] | None = None,
        ends: Sequence[tuple[int, BlockHash]] = (),
    ) -> Fetch:
        """Start to fetch the leading blocks of `hashes` that the store has.

        Args:
            hashes: a run of a request's blocks, from the first one that is not cached here.
            compute_s: returns predicted seconds to compute the first n of them; called in another
                thread. If computing is faster, the blocks are not loaded.
            ends: as in `Fetch`.
        """
        self._take_done()
        # Another thread may not use the model itself, so it gets a straight line.
        base_s = self.predicted_s(0)
        block_s = (self.predicted_s(len(hashes)) - base_s) / max(1, len(hashes))

        def worth(num_found: int) -> bool:
            return compute_s is None or base_s + num_found * block_s < compute_s(num_found)

        room = self._num_fetchable - sum(len(fetch.hashes) for fetch in self._under_way)
        room -= sum(len(fetch.blocks) for fetch in self._ended)
        fetch = Fetch(tuple(hashes[: max(0, room)]), worth, ends)
        self.stats.num_misses += len(hashes) - len(fetch.hashes)
        if self._closed or room <= 0:
            fetch.error = "the tier is closed" if self._closed else "too many fetches at a time"
        if not hashes or fetch.error is not None:
            self._end(fetch)
        else:
            self._under_way.append(fetch)
            self._thread.fetch(fetch)
        return fetch

    def probe(self, block_hash: BlockHash) -> None:
        """Look up a hash in an unreachable store, to find out whether it is reachable again."""
        if not self._under_way:
            self.lookup((block_hash,), lambda num_found: 0.0)

    def cancel(self, fetch: Fetch) -> None:
        """Cancel a lookup whose blocks are no longer needed. `poll` still reports it."""
        fetch.is_cancelled = True

    def forget(self, block_hashes: Sequence[BlockHash]) -> None:
        """Forget that these blocks are stored, so that they are stored again when evicted."""
        for name in block_hashes:
            self._known.pop(name, None)

    def counts(self) -> StoreCounts:
        """The counters for `WorkerStatus`."""
        return replace(self.stats, num_damaged=self._thread.num_damaged)

    def poll(self) -> list[Fetch]:
        """Lookups that ended since the last call, each once."""
        self._take_done()
        ended, self._ended = self._ended, []
        for fetch in ended:
            fetch.done = True
        return ended

    def close(self, timeout_s: float = 2.0) -> bool:
        """Store the queued blocks for at most `timeout_s`. Returns False if a call still hangs.

        Running lookups end with a last `poll`; later ones find nothing.
        """
        self._closed = True
        in_time = self._thread.close(timeout_s)
        self._take_done()
        for fetch in self._under_way:
            fetch.is_cancelled = True
            fetch.error = "the tier is closed"
            self._end(fetch)
        self._under_way.clear()
        return in_time

    def _should_store(self, block_hash: BlockHash) -> bool:
        """Whether to store a block. If not, the reason is counted in `stats`."""
        if block_hash in self._known:
            self._known.move_to_end(block_hash)
            self.stats.num_known += 1
            return False
        num_queued = self.queued_nbytes // self._block_nbytes
        if self._is_away:
            self.probe(block_hash)
        elif not self._closed and num_queued < self._num_queueable:
            return True
        self.stats.num_dropped += 1
        return False

    def _take_done(self) -> None:
        for done in self._thread.take_done():
            if isinstance(done, Put):
                self._finish_put(done)
            elif done in self._under_way:  # otherwise `close` has ended it
                self._finish_fetch(done)

    def _finish_put(self, put: Put) -> None:
        self.queued_nbytes -= self._block_nbytes
        if put.error is not None:
            self.stats.num_failed += 1
            self._failed(put.error)
            return
        self._is_away = False
        self.stats.num_stored += 1
        self._remember((put.block_hash,))

    def _finish_fetch(self, fetch: Fetch) -> None:
        self._under_way.remove(fetch)
        if fetch.error is not None:
            self._failed(fetch.error)
        elif not fetch.is_cancelled:  # otherwise the store may not have been called
            self._is_away = False
            nbytes = len(fetch.blocks) * self._block_nbytes
            self._times.observe(STORE_ID, nbytes, fetch.seconds)
            self._observed_s = self._clock()
            self._remember(fetch.hashes[: fetch.num_found])
            self.forget(fetch.hashes[fetch.num_found :])
        if fetch.is_cancelled:
            fetch.blocks = []
        self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        self.stats.num_hits += len(fetch.blocks)
        self.stats.num_misses += len(fetch.hashes) - len(fetch.blocks)
        self._ended.append(fetch)

    def _remember(self, hashes: Sequence[BlockHash]) -> None:
        for name in hashes:
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _failed(self, error: str) -> None:
        if not self._is_away:
            log.warning(
                "The store for evicted KV is unreachable, so evicted prefixes are computed again:"
                " %s",
                error,
            )
        self._is_away = True
        self._known.clear()  # the server may come back empty
