"""The cold KV tier: evicted blocks are stored outside of the worker (in Redis) and loaded again.

It is used by the engine's thread only, and no method waits: `StoreThread` makes the network calls.
Every failure is a cache miss: blocks that are lost, late or damaged are computed.

After a failure the store counts as unreachable until it has answered a probe. No request waits for
the probe.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.blocks import BlockHash
from disagg.messages import StoreCounts
from disagg.store.ranked_store import RankedStoreThread, RankStore
from disagg.store.store import ColdStore
from disagg.store.store_thread import Block, FetchDone, FetchJob, PutJob, PutsDone, StoreThread
from disagg.time_model import TransferTimeModel

log = logging.getLogger(__name__)

STORE_ID = "store"  # its source id in a `TransferTimeModel`

_STALE_S = 60.0  # measured times expire after this time, so that a slow store is tried again

_MAX_KNOWN = 32768  # largest number of remembered hashes, about 200 bytes each

_QUEUE_NBYTES = 64 << 20  # usual limit of blocks that wait to be stored
_FETCH_NBYTES = 256 << 20  # usual limit of blocks that are being fetched
# Both limits have at least this many blocks, however large these are, because a prompt evicts many
# blocks at once and needs all of them.
_NUM_QUEUED_BLOCKS = 64
_NUM_FETCHED_BLOCKS = 128


def queue_nbytes_for(block_nbytes: int) -> int:
    """Largest size of all blocks that wait to be stored: 64 MiB, or 64 blocks if that is more."""
    return max(_QUEUE_NBYTES, _NUM_QUEUED_BLOCKS * block_nbytes)


def fetch_nbytes_for(block_nbytes: int) -> int:
    """Largest size of all blocks that are fetched at a time: 256 MiB, or 128 blocks if more."""
    return max(_FETCH_NBYTES, _NUM_FETCHED_BLOCKS * block_nbytes)


@dataclass(slots=True, eq=False)
class Fetch:
    """A lookup in progress. `ColdTier.poll` sets `done`; nothing changes after that."""

    hashes: tuple[BlockHash, ...]
    done: bool = False
    num_found: int = 0  # leading blocks in the store, loaded or not
    blocks: list[bytes] = field(default_factory=list)  # the blocks of `hashes[:len(blocks)]`
    seconds: float = 0.0  # time in the store, without the time in the queue
    error: str | None = None  # why blocks may be missing


@dataclass(slots=True)
class ColdTierStats:
    """Counts since the start. `queued_nbytes` is the current value."""

    num_stored: int = 0
    num_dropped: int = 0  # blocks not stored: the store is unreachable, or the queue full or closed
    num_known: int = 0  # offered blocks that are already in the store
    num_put_failures: int = 0
    queued_nbytes: int = 0
    num_hits: int = 0  # blocks that were loaded
    num_misses: int = 0  # blocks that were looked up and not loaded


class ColdTier:
    """One worker's access to the store.

    Args:
        store: used only by the tier from now on; `close` closes it.
        block_nbytes: size of every block; with several ranks, the size of the first rank's part.
        times: learns the store's latency and rate under the source `STORE_ID`.
        queue_nbytes: largest size of all blocks that wait to be stored; None for
            `queue_nbytes_for`.
        fetch_nbytes: largest size of all blocks that are being fetched or wait for `poll`; None
            for `fetch_nbytes_for`.
        clock: returns monotonic seconds.
        others: the stores of the worker's other ranks that put their parts.
    """

    def __init__(
        self,
        store: ColdStore,
        block_nbytes: int,
        times: TransferTimeModel,
        *,
        queue_nbytes: int | None = None,
        fetch_nbytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        others: Sequence[RankStore] = (),
    ) -> None:
        self._block_nbytes = block_nbytes
        self._times = times
        self._clock = clock
        self._observed_s = clock()
        self._queue_nbytes = queue_nbytes or queue_nbytes_for(block_nbytes)
        fetch_nbytes = fetch_nbytes or fetch_nbytes_for(block_nbytes)
        self._num_fetchable = max(1, fetch_nbytes // block_nbytes)
        own = StoreThread(store, block_nbytes, clock)
        self._thread = RankedStoreThread(own, others, clock) if others else own
        self._under_way: dict[int, tuple[Fetch, FetchJob]] = {}
        self._ended: list[Fetch] = []
        self._next_id = 0
        self._closed = False
        self._is_away = False
        self._known: OrderedDict[BlockHash, None] = OrderedDict()
        self.stats = ColdTierStats()

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
        stats, before_nbytes = self.stats, self.stats.queued_nbytes
        to_store: list[tuple[int, BlockHash]] = []
        for each in blocks:
            if self._should_store(each[1]):
                stats.queued_nbytes += self._block_nbytes
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
            stats.queued_nbytes = before_nbytes
            raise
        self._thread.put(
            [
                PutJob(block_hash, block, number, in_host)
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
        self, hashes: Sequence[BlockHash], compute_s: Callable[[int], float] | None = None
    ) -> Fetch:
        """Start to fetch the leading blocks of `hashes` that the store has.

        Args:
            hashes: a run of a request's blocks, from the first one that is not cached here.
            compute_s: returns predicted seconds to compute the first n of them; called in another
                thread. If computing is faster, the blocks are not loaded.
        """
        fetch = Fetch(tuple(hashes))
        self._take_done()
        room = self._num_fetchable - sum(len(job.hashes) for _, job in self._under_way.values())
        room -= sum(len(ended.blocks) for ended in self._ended)
        if self._closed or room <= 0:
            fetch.error = "the tier is closed" if self._closed else "too many fetches at a time"
        if not hashes or fetch.error is not None:
            self._end(fetch)
            return fetch
        # Another thread may not use the model itself, so it gets a straight line.
        base_s = self.predicted_s(0)
        block_s = (self.predicted_s(len(hashes)) - base_s) / len(hashes)

        def worth(num_found: int) -> bool:
            return compute_s is None or base_s + num_found * block_s < compute_s(num_found)

        job = FetchJob(self._next_id, fetch.hashes[:room], worth)
        self._next_id += 1
        self._under_way[job.fetch_id] = (fetch, job)
        self._thread.fetch(job)
        return fetch

    def probe(self, block_hash: BlockHash) -> None:
        """Look up a hash in an unreachable store, to find out whether it is reachable again."""
        if not self._under_way:
            self.lookup((block_hash,), lambda num_found: 0.0)

    def cancel(self, fetch: Fetch) -> None:
        """Cancel a lookup whose blocks are no longer needed. `poll` still reports it."""
        for other, job in self._under_way.values():
            if other is fetch:
                job.cancelled = True

    def forget(self, block_hashes: Sequence[BlockHash]) -> None:
        """Forget that these blocks are stored, so that they are stored again when evicted."""
        for name in block_hashes:
            self._known.pop(name, None)

    def counts(self) -> StoreCounts:
        """The counters for `WorkerStatus`."""
        stats = self.stats
        return StoreCounts(
            num_hits=stats.num_hits,
            num_misses=stats.num_misses,
            num_stored=stats.num_stored,
            num_known=stats.num_known,
            num_dropped=stats.num_dropped,
            num_failed=stats.num_put_failures,
            num_damaged=self._thread.num_damaged,
        )

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
        for fetch, job in self._under_way.values():
            job.cancelled = True
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
        queued_nbytes = self._block_nbytes + self.stats.queued_nbytes
        if self._is_away:
            self.probe(block_hash)
        elif not self._closed and queued_nbytes <= self._queue_nbytes:
            return True
        self.stats.num_dropped += 1
        return False

    def _take_done(self) -> None:
        for done in self._thread.take_done():
            if isinstance(done, PutsDone):
                self._finish_puts(done)
            else:
                self._finish_fetch(done)

    def _finish_puts(self, done: PutsDone) -> None:
        self.stats.queued_nbytes -= done.nbytes
        if done.error is not None:
            self.stats.num_put_failures += len(done.block_hashes)
            self._failed(done.error)
            return
        self._is_away = False
        self.stats.num_stored += len(done.block_hashes)
        self._remember(done.block_hashes)

    def _finish_fetch(self, done: FetchDone) -> None:
        if done.fetch_id not in self._under_way:
            return  # `close` has ended it
        fetch, job = self._under_way.pop(done.fetch_id)
        fetch.num_found, fetch.seconds, fetch.error = done.num_found, done.seconds, done.error
        if not job.cancelled:
            fetch.blocks = done.blocks
        if done.error is not None:
            self._failed(done.error)
        elif not job.cancelled:  # a cancelled job may not have called the store
            self._is_away = False
            nbytes = len(done.blocks) * self._block_nbytes
            self._times.observe(STORE_ID, nbytes, done.seconds)
            self._observed_s = self._clock()
            self._remember(job.hashes[: done.num_found])
            self.forget(job.hashes[done.num_found :])
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
