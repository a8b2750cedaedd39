"""A transport and a store as bad as drawn: late, lost, doubled, torn, broken, hung. No threads."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

from disagg.engine.sched.step import Sampled, StepPlan
from disagg.kvtransfer.local_transport import LocalTransport
from disagg.kvtransfer.pulls import Pull
from disagg.kvtransfer.slab import BlockRun
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.store.cold_tier import ColdStore, Fetch, Put, StoreThread
from tests.engine.fake_runner import FakeKV, FakeRunner

Pairs: TypeAlias = Sequence[tuple[int, int]]


class Fates:
    """What goes wrong, as drawn: one number for each thing that might. None at all, or 0: nothing.

    calm: from now on nothing goes wrong, and nothing that hangs goes on hanging.
    met: how often what took effect.
    """

    def __init__(self, drawn: bytes, met: Counter[str] | None = None) -> None:
        self.met: Counter[str] = Counter() if met is None else met
        self._drawn = drawn
        self._next = 0
        self.calm = not drawn

    def draw(self) -> int:
        if self.calm:
            return 0
        self._next += 1
        return self._drawn[(self._next - 1) % len(self._drawn)]


@dataclass
class _Flight:
    pull: Pull
    num_polls: int  # until it ends
    fails: bool
    hangs: bool
    num_copied: int = 0


class FatefulTransport(LocalTransport):
    """A local transport whose pulls take several polls, half of the blocks at each end."""

    def __init__(self, fates: Fates, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fates = fates
        self._flights: list[_Flight] = []
        self._late: deque[tuple[Peer, str]] = deque()  # notifications

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        pull = self._book.begin(ticket, first_block, into, self._clock(), releases)
        fate = self._fates.draw()
        flight = _Flight(pull, fate // 8 % 8, fails=fate % 8 == 1, hangs=fate % 8 == 2)
        self._fates.met["pull hung"] += flight.hangs
        self._flights.append(flight)
        return pull.pull_id

    def poll(self) -> list[PullDone | TicketReleased]:
        for _ in range(len(self._late)):
            self._notify(*self._late.popleft())
        events: list[PullDone | TicketReleased] = []
        while self._inbox:
            events.append(TicketReleased(self._inbox.popleft()))
        for flight in list(self._flights):
            done = self._fly(flight)
            if done is not None:
                self._flights.remove(flight)
                events.append(done)
        return events

    def _fly(self, flight: _Flight) -> PullDone | None:
        pull = flight.pull
        flight.num_polls -= 1
        is_over = self._fates.calm or (flight.num_polls < 0 and not flight.hangs)
        source = self._fleet.sides.get((pull.peer.worker_id, pull.peer.epoch))
        if source is not None and source.peer != pull.peer:
            source = None  # its slab may be smaller than it was said to be
        error = None if source is not None else "source gone"
        if source is not None:
            blocks = [_nth(run, i) for run in pull.runs for i in range(run.num_blocks)]
            end = len(blocks) if is_over else (len(blocks) + 1) // 2
            missing = replace(pull, runs=tuple(blocks[flight.num_copied : end]))
            self._copy_blocks(missing, pull.sources[0], source)
            flight.num_copied = end
            if is_over and flight.fails and not self._fates.calm:
                error = "wire broke"
            elif is_over:
                self._copy_generations(pull, source)
                if not pull.is_unchanged(self._scratch):
                    error = "pull torn"
        elif flight.hangs and not self._fates.calm:
            self._fates.met["hung with a dead source"] += flight.num_polls == -1
            return None  # a dead source does not end it either
        else:
            is_over = True
        if not is_over:
            return None
        self._book.end(pull)
        if pull.releases:
            self._notify(pull.peer, pull.ticket.ticket_id)
        self._fates.met["pull failed"] += error is not None
        self._fates.met[error or "pulled"] += 1
        return PullDone(pull.pull_id, error, pull.num_blocks, pull.nbytes, 0.001)

    def _notify(self, peer: Peer, ticket_id: str) -> None:
        fate = self._fates.draw() % 8
        if 0 < fate < 4:
            self._fates.met[("word lost", "word late", "word doubled")[fate - 1]] += 1
        if fate == 1:
            return
        if fate == 2:
            self._late.append((peer, ticket_id))
            return
        for _ in range(2 if fate == 3 else 1):
            super()._notify(peer, ticket_id)


class DeviceLost(Exception):
    """What a runner raises when its device is gone."""


class BreakableRunner(FakeRunner):
    """Raises in the middle of a step once `breaks` is set."""

    breaks = False

    def run(self, plan: StepPlan) -> list[Sampled]:
        if self.breaks:
            raise DeviceLost("the device fell off the bus")
        return super().run(plan)


def _nth(run: BlockRun, i: int) -> BlockRun:
    return BlockRun(run.source_block + i, run.local_block + i, 1)


class SteppedCopier:
    """Copies between a worker's cache and host memory when asked what has ended; or later, what is
    there by then.
    """

    def __init__(self, fates: Fates, kv: FakeKV, num_slots: int) -> None:
        self._fates = fates
        self._kv = kv
        self._slots = [b""] * num_slots
        self._saves: deque[Pairs] = deque()
        self._loads: deque[Pairs] = deque()

    def save(self, pairs: Pairs) -> None:
        self._saves.append(pairs)

    def load(self, pairs: Pairs) -> None:
        self._loads.append(pairs)

    def take_saved(self) -> int:
        return self._take(self._saves, self._kv.read_block, self._write_slot)

    def take_loaded(self) -> list[float]:
        return [0.001] * self._take(self._loads, self.read_slot, self._kv.write_block)

    def read_slot(self, slot: int) -> bytes:
        return self._slots[slot]

    def close(self) -> None:
        self._saves.clear()
        self._loads.clear()

    def _write_slot(self, slot: int, block: bytes) -> None:
        self._slots[slot] = block

    def _take(
        self,
        queue: deque[Pairs],
        read: Callable[[int], bytes],
        write: Callable[[int, bytes], None],
    ) -> int:
        num_ended = 0
        while queue:
            if self._fates.draw() % 4 == 1:
                break
            for source, into in queue.popleft():
                write(into, read(source))
            num_ended += 1
        return num_ended


class SteppedStoreThread(StoreThread):
    """Does its jobs when it is asked what is done; or some time later, as fate wills."""

    def __init__(
        self,
        fates: Fates,
        store: ColdStore,
        block_nbytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._fates = fates
        self._store = store
        self.block_nbytes = block_nbytes
        self._num_per_call = 2
        self._clock = clock
        self._outbox: SimpleQueue[Fetch | Put] = SimpleQueue()
        self._jobs: deque[Fetch | Put] = deque()

    def fetch(self, fetch: Fetch) -> None:
        self._jobs.append(fetch)

    def put(self, puts: Sequence[Put]) -> None:
        self._jobs.extend(puts)

    def take_done(self) -> list[Fetch | Put]:
        while self._jobs and self._fates.draw() % 4 != 1:
            job = self._jobs.popleft()
            if isinstance(job, Fetch):
                self._fetch(job)
            elif self._fates.draw() % 8 == 1:
                self._fates.met["store away"] += 1
                job.error = "the store is away"
            else:
                self._put([job])
            self._outbox.put(job)
        return super().take_done()

    def close(self, timeout_s: float) -> bool:
        self._jobs.clear()
        return True
