"""An evicted prefix comes back from the worker's own host memory, if that beats computing it.

Loaded blocks become findable in the cache, as if they had never left it, and then the sequence goes
on to the next door: to the store for what follows them, or to the engine, which finds them. So
whatever goes wrong on the way means that less is found. Other sequences step meanwhile. Knows
nothing of devices. Owned by the engine's thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from disagg.blocks import BlockHash
from disagg.decode_worker.entering import enter_or_end
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.messages import HostCounts, KVEvent
from disagg.store.host_tier import HostLoad, HostTier

# (new tokens, tokens before them) -> seconds
PrefillTimes = Callable[[int, int], float]
NextDoor = Callable[[Sequence, float], None]


@dataclass(slots=True, eq=False)
class _Visit:
    sequence: Sequence
    wanted: tuple[BlockHash, ...]  # as far as cache and host memory go
    compute_s: float  # what it may take at most, since that is what computing would
    ends_s: float = 0.0  # once it loads
    load: HostLoad | None = None
    blocks: list[int] = field(default_factory=list)  # held meanwhile: found here, then loaded
    is_given_up: bool = False  # nobody waits for the load, which goes on


class HostPrefixes:
    """Sequences that wait for blocks from host memory, and the way there for blocks that fill up.

    Args:
        prefill_times: the step model as of now.
        next_door: takes a sequence, and the time; may raise `RequestError`.
    """

    def __init__(
        self,
        engine: Engine,
        tier: HostTier,
        prefill_times: Callable[[], PrefillTimes],
        next_door: NextDoor,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._prefill_times = prefill_times
        self._next_door = next_door
        self._waiting: list[_Visit] = []  # for room in the cache
        self._loading: list[_Visit] = []

    @property
    def num_arriving(self) -> int:
        return len(self._waiting) + sum(not visit.is_given_up for visit in self._loading)

    def counts(self) -> HostCounts:
        """For `WorkerStatus`."""
        return self._tier.counts()

    def hashes(self) -> tuple[BlockHash, ...]:
        return self._tier.hashes()

    def take_events(self) -> tuple[KVEvent, ...]:
        return self._tier.take_events()

    def save(self, events: Iterable[KVEvent]) -> None:
        """Copy what a step has made findable in the cache."""
        stored = [name for event in events if event.kind == "stored" for name in event.block_hashes]
        match = self._engine.pool.match
        self._tier.save([(block_id, name) for name in stored for block_id in match((name,))])

    def used(self, sequence: Sequence) -> None:
        """A sequence has come to its end: its blocks go last, and their beginning last of all."""
        self._tier.touch(sequence.block_hashes)

    def leave(self, evicted: list[tuple[int, BlockHash]]) -> list[tuple[int, BlockHash]]:
        """Blocks leave the cache. Returns those that are not here."""
        return [each for each in evicted if each[1] not in self._tier]

    def admit(self, sequence: Sequence, now: float) -> None:
        """Bring the sequence's prefix back into the cache, or pass it on at once.

        Raises:
            RequestError: of the next door.
        """
        pool = self._engine.pool
        # The last token is computed in any case: its logits are wanted.
        wanted = tuple(sequence.block_hashes[: (len(sequence.tokens) - 1) // pool.block_size])
        self._tier.touch(wanted)
        num_here = len(pool.match(wanted))
        num_found = self._tier.match(wanted[num_here:])
        new_tokens, before = num_found * pool.block_size, num_here * pool.block_size
        compute_s = self._prefill_times()(new_tokens, before) if num_found else 0.0
        if self._tier.predicted_s(num_found) >= compute_s:
            self._next_door(sequence, now)
            return
        self._engine.scheduler.number(sequence)
        visit = _Visit(sequence, wanted[: num_here + num_found], compute_s)
        insort(self._waiting, visit, key=lambda each: each.sequence.arrival)

    def advance(self, now: float) -> bool:
        """Let those in whose blocks are here, and start what there is room for.

        True while copies are under way.
        """
        self._tier.poll()
        for visit in list(self._loading):
            assert visit.load is not None
            if visit.load.done:
                self._loading.remove(visit)
                self._land(visit)
            if not visit.is_given_up and (visit.load.done or now >= visit.ends_s):
                visit.is_given_up = True
                self._pass_on(visit, now)
        while self._waiting and self._start(self._waiting[0], now):
            del self._waiting[0]
        return bool(self._tier.num_under_way)

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence. A load under way ends, and is then as good for the next one."""
        for visit in self._waiting:
            if visit.sequence.request_id == request_id:
                self._waiting.remove(visit)
                return True
        for visit in self._loading:
            if visit.sequence.request_id == request_id and not visit.is_given_up:
                visit.is_given_up = True
                return True
        return False

    def take_waiting(self) -> list[Sequence]:
        """Give up all that wait."""
        visits = self._waiting + [each for each in self._loading if not each.is_given_up]
        self._waiting = []
        for visit in visits:
            visit.is_given_up = True
        return [visit.sequence for visit in visits]

    def holders(self) -> Iterable[list[int]]:
        """Blocks held here, for `Engine.check`."""
        return (visit.blocks for visit in self._loading)

    def check(self) -> None:
        """Recount the tier. Raises `AssertionError`."""
        self._tier.check()

    def close(self) -> None:
        self._tier.close()

    def _start(self, visit: _Visit, now: float) -> bool:
        """Begin to load what the cache lacks, or pass on. False: not yet."""
        pool = self._engine.pool
        found = pool.match(visit.wanted)
        missing = visit.wanted[len(found) :]
        missing = missing[: self._tier.match(missing)]
        if not missing:
            self._pass_on(visit, now)
            return True
        if any(missing[0] in each.wanted for each in self._loading):
            return False  # another one is bringing it
        pool.acquire(found)  # before reserving, which might evict them
        reserved = self._engine.reserve(len(missing), visit.sequence.arrival)
        if reserved is None:
            pool.release(found)
            can_wait = self._loading or self._engine.scheduler.running
            if can_wait and now < visit.sequence.deadline_unix_s:
                return False
            self._pass_on(visit, now)
            return True
        visit.load = self._tier.load(missing, reserved)
        visit.blocks = [*found, *reserved]
        visit.ends_s = min(now + visit.compute_s, visit.sequence.deadline_unix_s)
        self._loading.append(visit)
        return True

    def _land(self, visit: _Visit) -> None:
        """What was loaded is findable from now on, and nobody's, if nobody asks for it."""
        pool = self._engine.pool
        for block_id, block_hash in zip(visit.blocks, visit.wanted, strict=False):
            pool.publish(block_id, block_hash)
        pool.release(visit.blocks)

    def _pass_on(self, visit: _Visit, now: float) -> None:
        enter_or_end(self._engine, visit.sequence, lambda each: self._next_door(each, now))
