"""The store of a worker with several ranks, each of which puts and loads its part of every block.

The first rank decides. A block is stored when all ranks have put their parts. To load a block, the
first rank looks it up and loads its own part; the other ranks then load theirs into the same block
of the cache. The block is accepted when all ranks have loaded their parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from disagg.blocks import BlockHash
from disagg.store.store_thread import Done, FetchJob, PutJob, PutsDone, StoreThread


class RankStore(Protocol):
    """The first rank's interface to the store of another rank. Only `wait` waits."""

    @property
    def num_damaged(self) -> int:
        """Number of damaged values that the rank has read so far."""
        ...

    def put(self, blocks: Sequence[tuple[int, BlockHash]], in_host: bool) -> None:
        """Put the rank's parts of blocks.

        They are read before any later task of the rank can overwrite them.

        Args:
            blocks: hashes of blocks, each with its number in the cache or, if `in_host`, its slot.
        """
        ...

    def take_put(self) -> list[str | None]:
        """An error or None for each block that was put since the last call, in order."""
        ...

    def fetch(self, number: int, names: Sequence[BlockHash], into: Sequence[int]) -> None:
        """Load the rank's parts of blocks to cache blocks that nothing else reads or writes."""
        ...

    def take_fetched(self) -> list[tuple[int, str | None]]:
        """The fetches that ended since the last call, by number, each with its error or None."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until the rank has a report. Returns False after the timeout or if it is gone."""
        ...


class RankedStoreThread:
    """Like `StoreThread`, for all ranks: a put has ended when it has ended on all ranks.

    Args:
        own: the thread of the first rank, which also fetches.
        others: the stores of the other ranks.
    """

    def __init__(
        self, own: StoreThread, others: Sequence[RankStore], clock: Callable[[], float]
    ) -> None:
        self._own, self._others = own, others
        self._clock = clock
        self._names: deque[BlockHash] = deque()  # blocks whose put has not ended on all ranks
        self._block_nbytes = own.block_nbytes
        # Results of these blocks by rank, in the same order.
        self._errors: list[deque[str | None]] = [deque() for _ in (own, *others)]
        self._done: list[Done] = []

    @property
    def num_damaged(self) -> int:
        return self._own.num_damaged + sum(rank.num_damaged for rank in self._others)

    def fetch(self, job: FetchJob) -> None:
        self._own.fetch(job)

    def put(self, jobs: Sequence[PutJob]) -> None:
        """Put blocks, which are either all in the cache or all in host memory."""
        self._own.put(jobs)
        self._names.extend(job.block_hash for job in jobs)
        for rank in self._others:
            rank.put([(job.number, job.block_hash) for job in jobs], jobs[0].in_host)

    def take_done(self) -> list[Done]:
        self._collect()
        done, self._done = self._done, []
        return done

    def close(self, timeout_s: float) -> bool:
        """Like `StoreThread.close`, and also wait until the other ranks have put their parts."""
        until_s = self._clock() + timeout_s
        in_time = self._own.close(timeout_s)
        self._collect()
        for errors, rank in zip(self._errors[1:], self._others, strict=True):
            while len(errors) < len(self._names) and (left_s := until_s - self._clock()) > 0:
                if not rank.wait(left_s):
                    break
                self._collect()
        return in_time

    def _collect(self) -> None:
        own, *others = self._errors
        for done in self._own.take_done():
            if isinstance(done, PutsDone):
                own.extend([done.error] * len(done.block_hashes))
            else:
                self._done.append(done)
        for errors, rank in zip(others, self._others, strict=True):
            errors.extend(rank.take_put())
        for _ in range(min(map(len, self._errors))):
            found = [errors.popleft() for errors in self._errors]
            error = next((each for each in found if each is not None), None)
            self._done.append(PutsDone((self._names.popleft(),), self._block_nbytes, error))


@dataclass(slots=True, eq=False)
class RankedFetch:
    """One fetch by all other ranks."""

    names: Sequence[BlockHash]
    num_running: int
    error: str | None = None


class RankedFetches:
    """The fetches of the other ranks.

    Args:
        others: the stores of the other ranks.
    """

    def __init__(self, others: Sequence[RankStore]) -> None:
        self._others = others
        self._running: dict[int, RankedFetch] = {}
        self._numbers = count()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, names: Sequence[BlockHash], into: Sequence[int]) -> RankedFetch:
        """Let all other ranks load their parts of blocks to cache blocks."""
        number = next(self._numbers)
        self._running[number] = fetch = RankedFetch(names, len(self._others))
        for rank in self._others:
            rank.fetch(number, names, into)
        return fetch

    def take_ended(self) -> list[RankedFetch]:
        """The fetches that have ended on all ranks since the last call."""
        for rank in self._others if self._running else ():
            for number, error in rank.take_fetched():
                fetch = self._running[number]
                fetch.error = fetch.error or error
                fetch.num_running -= 1
        ended = [number for number, fetch in self._running.items() if not fetch.num_running]
        return [self._running.pop(number) for number in ended]
