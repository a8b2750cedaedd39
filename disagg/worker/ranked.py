"""Tasks that all ranks of a worker carry out: pulls, copies to host memory, and the store's.

The first rank decides, and each rank does a task for its part of every block. A task has ended when
it has on all ranks (`RankTasks`). Owned by the first rank's engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TypeAlias

from disagg.blocks import BlockHash
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased, Transport
from disagg.rank_messages import (
    ConnectPeer,
    ForgetPeer,
    PullBlocks,
    RankCopies,
    RankDone,
    RankFetch,
    RankPut,
    RankTask,
    encode,
)
from disagg.store.block_copier import BlockCopier
from disagg.store.cold_tier import ColdStore, Fetch, Put, StoreThread
from disagg.worker.other_rank import Rank

Ended: TypeAlias = Callable[[list[RankDone]], object]


@dataclass(slots=True)
class _Task:
    """ended: called with the reports of all parts.
    num_own: parts of the first rank that are running.
    ranks: other ranks whose parts are running.
    """

    ended: Ended
    num_own: int
    ranks: set[Rank]
    dones: list[RankDone] = field(default_factory=list)


class RankTasks:
    """The tasks that are running on the ranks of a worker, by number.

    ranks: the other ranks of the worker, in order.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self._running: dict[int, _Task] = {}
        self._numbers = count()

    def add(self, ended: Ended, num_own: int, ranks: Collection[Rank] | None = None) -> int:
        """A number for a task of these ranks, by default of all others."""
        number = next(self._numbers)
        self._running[number] = _Task(ended, num_own, set(self.ranks if ranks is None else ranks))
        return number

    def tell(self, task: RankTask, ranks: Collection[Rank] | None = None) -> None:
        """Let ranks begin a task. If one has ended, `Ranks.watch` reports it."""
        frame = encode(task)
        for rank in self.ranks if ranks is None else ranks:
            rank.tell(frame)

    def end(self, done: RankDone) -> None:
        """A part of the first rank has ended."""
        task = self._running[done.number]
        task.num_own -= 1
        self._take(task, done)

    def poll(self) -> None:
        """Read the reports of the other ranks."""
        for rank in self.ranks if self._running else ():
            for done in rank.take_reports():
                task = self._running[done.number]
                task.ranks.remove(rank)
                self._take(task, done)

    def finish(self, numbers: Collection[int], timeout_s: float) -> None:
        """Wait until these tasks have ended on the ranks that are alive, or for `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        for rank in self.ranks:
            while any(
                number in self._running and rank in self._running[number].ranks
                for number in numbers
            ):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not rank.wait(left_s):
                    break
                self.poll()

    def _take(self, task: _Task, done: RankDone) -> None:
        task.dones.append(done)
        if not task.num_own and not task.ranks:
            del self._running[done.number]
            task.ended(task.dones)


def first_error(dones: Sequence[RankDone]) -> str | None:
    return next((done.error for done in dones if done.error is not None), None)


class RankedTransport:
    """Implements `Transport`; a pull has the id of the first rank's part.

    Each rank pulls what it needs from the ranks of the source that have it (`pulls.sources_of`), so
    workers may have different numbers of ranks. The first rank issues and checks tickets. Its
    stamps are valid for all ranks, because it bumps a block's stamp before it tells any rank to
    write to the block. So a reader compares the stamps of the first rank, whichever rank it copied
    from. A pull succeeds if it succeeds on all ranks, and the source is notified when it has ended
    on all.

    Args:
        own: of the first rank.
    """

    def __init__(self, own: Transport, tasks: RankTasks) -> None:
        self._own = own
        self._tasks = tasks
        self._peer = replace(own.peer, ranks=tuple(rank.peer for rank in tasks.ranks))
        self._numbers: dict[int, int] = {}  # of tasks, by the id of the pull
        self._own_done: dict[int, PullDone] = {}  # by the number of the task
        self._events: list[PullDone | TicketReleased] = []

    @property
    def peer(self) -> Peer:
        return self._peer

    def add_peer(self, peer: Peer) -> bool:
        # Each route that moves KV adds its source, a message of some KB to each rank.
        is_new = self._own.add_peer(peer)
        if is_new:
            self._tasks.tell(ConnectPeer(peer))
        return is_new

    def forget_peer(self, worker_id: str) -> None:
        self._own.forget_peer(worker_id)
        self._tasks.tell(ForgetPeer(worker_id))

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        pull_id = self._own.pull(ticket, first_block, into, releases=False)  # refuses what is wrong
        number = self._tasks.add(partial(self._ended, ticket if releases else None), num_own=1)
        self._numbers[pull_id] = number
        self._tasks.tell(PullBlocks(number, ticket, first_block, into))
        return pull_id

    def release(self, ticket: KVTicket) -> None:
        self._own.release(ticket)

    def poll(self) -> list[PullDone | TicketReleased]:
        for event in self._own.poll():
            if isinstance(event, PullDone):
                number = self._numbers.pop(event.pull_id)
                self._own_done[number] = event
                self._tasks.end(RankDone.of_pull(number, event))
            else:
                self._events.append(event)
        self._tasks.poll()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._own.close()

    def _ended(self, used: KVTicket | None, dones: list[RankDone]) -> None:
        """Report the bytes of all ranks, in the time of the slowest.

        Args:
            used: the ticket, if its source is told.
        """
        if used is not None:
            self._own.release(used)
        total = replace(
            self._own_done.pop(dones[0].number),
            error=first_error(dones),
            nbytes=sum(done.nbytes for done in dones),
            seconds=max(done.seconds for done in dones),
            is_torn=any(done.is_torn for done in dones),
        )
        self._events.append(total)


class RankedCopier:
    """Implements `BlockCopier`: every rank copies its part of the blocks.

    A block has the same slot on all ranks, so one host tier decides for all of them.

    Args:
        own: the copier of the first rank.
    """

    def __init__(self, own: BlockCopier, tasks: RankTasks) -> None:
        self._own = own
        self._tasks = tasks
        self._saves: deque[int] = deque()  # numbers of tasks whose own part is running
        self._loads: deque[int] = deque()
        self._num_saved = 0
        self._loaded_s: list[float] = []

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._saves.append(self._tasks.add(self._saved, num_own=1))
        self._tasks.tell(RankCopies(self._saves[-1], False, [*pairs]))
        self._own.save(pairs)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._loads.append(self._tasks.add(self._loaded, num_own=1))
        self._tasks.tell(RankCopies(self._loads[-1], True, [*pairs]))
        self._own.load(pairs)

    def take_saved(self) -> int:
        for _ in range(self._own.take_saved()):
            self._tasks.end(RankDone(self._saves.popleft()))
        self._tasks.poll()
        num_saved, self._num_saved = self._num_saved, 0
        return num_saved

    def take_loaded(self) -> list[float]:
        """The seconds of the slowest rank."""
        for seconds in self._own.take_loaded():
            self._tasks.end(RankDone(self._loads.popleft(), seconds=seconds))
        self._tasks.poll()
        loaded_s, self._loaded_s = self._loaded_s, []
        return loaded_s

    def read_slot(self, slot: int) -> bytes:
        """The first rank's part of a block. Other ranks read their parts when they store them."""
        return self._own.read_slot(slot)

    def close(self) -> None:
        """Close the first rank's copier. The other ranks close theirs when they end."""
        self._own.close()

    def _saved(self, dones: list[RankDone]) -> None:
        self._num_saved += 1

    def _loaded(self, dones: list[RankDone]) -> None:
        self._loaded_s.append(max(done.seconds for done in dones))


class RankedStoreThread(StoreThread):
    """Makes the first rank's calls to the store; a put has ended when it has ended on all ranks."""

    def __init__(
        self,
        store: ColdStore,
        block_nbytes: int,
        tasks: RankTasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, block_nbytes, clock)
        self._tasks = tasks
        # If several ranks have the same bytes, only one of them puts these.
        self._putting = [r for r in tasks.ranks if r.peer.part is None or not r.peer.part.copy]
        self._numbers: dict[Put, int] = {}  # of tasks
        self._done: list[Fetch | Put] = []

    @property
    def num_damaged(self) -> int:
        return super().num_damaged + sum(rank.num_damaged for rank in self._tasks.ranks)

    def put(self, puts: Sequence[Put]) -> None:
        """Put blocks, which are either all in the cache or all in host memory."""
        super().put(puts)
        number = self._tasks.add(partial(self._put_ended, puts), len(puts), self._putting)
        self._numbers.update(dict.fromkeys(puts, number))
        blocks = [(put.number, put.block_hash) for put in puts]
        self._tasks.tell(RankPut(number, blocks, puts[0].in_host), self._putting)

    def take_done(self) -> list[Fetch | Put]:
        for done in super().take_done():
            if isinstance(done, Put):
                self._tasks.end(RankDone(self._numbers[done], done.error))
            else:
                self._done.append(done)
        self._tasks.poll()
        ended, self._done = self._done, []
        return ended

    def close(self, timeout_s: float) -> bool:
        """As `StoreThread.close`, and also wait until the other ranks have put their parts."""
        until_s = self._clock() + timeout_s
        in_time = super().close(timeout_s)
        self._tasks.finish({*self._numbers.values()}, until_s - self._clock())
        return in_time

    def _put_ended(self, puts: Sequence[Put], dones: list[RankDone]) -> None:
        error = first_error(dones)
        for put in puts:
            del self._numbers[put]
            put.error = error
        self._done += puts


@dataclass(slots=True, eq=False)
class RankedFetch:
    """A fetch by all other ranks."""

    names: Sequence[BlockHash]
    error: str | None = None


class RankedFetches:
    """Loads the other ranks' parts of blocks from the store, after the first rank has found them.

    num_running: fetches that `take_ended` has not reported.
    """

    def __init__(self, tasks: RankTasks) -> None:
        self._tasks = tasks
        self._ended: list[RankedFetch] = []
        self.num_running = 0

    def begin(self, names: Sequence[BlockHash], into: Sequence[int]) -> RankedFetch:
        """Let all other ranks load their parts into blocks of the cache."""
        fetch = RankedFetch(names)
        number = self._tasks.add(partial(self._fetched, fetch), num_own=0)
        self.num_running += 1
        self._tasks.tell(RankFetch(number, [*names], [*into]))
        return fetch

    def take_ended(self) -> list[RankedFetch]:
        """The fetches that have ended on all ranks since the last call."""
        self._tasks.poll()
        ended, self._ended = self._ended, []
        self.num_running -= len(ended)
        return ended

    def _fetched(self, fetch: RankedFetch, dones: list[RankDone]) -> None:
        fetch.error = first_error(dones)
        self._ended.append(fetch)
