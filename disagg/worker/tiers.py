"""Host memory and the store behind a worker's cache: loading from there, and saving.

A tier is used if loading is predicted to beat computing. A source that is slower than predicted
costs at most the time of computing. Knows nothing of devices or Redis. Owned by the engine's
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from disagg.blocks import BlockHash
from disagg.engine.engine import Engine
from disagg.engine.sched.step import TokenEvent
from disagg.errors import InvalidLogits
from disagg.kv_groups import WantedPrefix
from disagg.messages import KVEvent
from disagg.store.cold_tier import Block, ColdTier, Fetch
from disagg.store.host_tier import HostTier
from disagg.worker.ranked import RankedFetch, RankedFetches

WriteBlock = Callable[[int, bytes], None]


@dataclass(slots=True, eq=False)
class StoreSource:
    """A lookup in the store of the blocks of full attention from `num_here` on, and then of those
    in windows that are needed with them.

    names: of the blocks that it may have; those of windows are added when it is known how many rows
        there are.
    fetches: of the worker's other ranks, if it has some.
    fetch: the lookup of blocks `num_here` to `num_here + len(fetch.hashes)` of `names`.
    """

    tier: ColdTier
    write_block: WriteBlock
    fetches: RankedFetches | None
    wanted: WantedPrefix
    names: SequenceOf[BlockHash]
    num_here: int
    fetch: Fetch
    answer_s: float
    num_tokens: int = 0
    of_windows: Fetch | None = None

    def find(self, first_block: int) -> int | None:
        if not self.fetch.done:
            return None
        end = self.num_here + len(self.fetch.blocks)
        groups = self.wanted.groups
        if groups.num_partial:
            if self.of_windows is None:
                num_rows = end // groups.num_full
                names = self.wanted.names(num_rows)
                if num_rows <= self.wanted.num_here:
                    return 0
                self.names, num = names, num_rows * groups.num_full
                del self.fetch.blocks[num - self.num_here :]
                self.of_windows = self.tier.lookup(names[num:])
                return None
            if not self.of_windows.done:
                return None
            end += len(self.of_windows.blocks)
            if end < len(self.names):
                return 0
        return max(0, end - first_block) if first_block >= self.num_here else 0

    def patience_s(self, num_blocks: int) -> float:
        return self.answer_s

    def begin(self, first_block: int, into: list[int]) -> RankedFetch | None:
        blocks = self.fetch.blocks + ([] if self.of_windows is None else self.of_windows.blocks)
        for block_id, block in zip(into, blocks[first_block - self.num_here :], strict=True):
            self.write_block(block_id, block)
        if self.fetches is None:
            return None
        return self.fetches.begin(self.names[first_block : first_block + len(into)], into)

    def drop(self) -> None:
        for each in (self.fetch, self.of_windows):
            if each is not None:
                self.tier.cancel(each)


class StoreLookup:
    """The store as a tier; no source while it is unreachable.

    Args:
        fetches: of the worker's other ranks, if it has some. They load after the first one, and so
            each of the two may take half as long as computing.
    """

    def __init__(
        self, tier: ColdTier, write_block: WriteBlock, fetches: RankedFetches | None = None
    ) -> None:
        self._tier = tier
        self._write_block = write_block
        self._fetches = fetches

    @property
    def num_under_way(self) -> int:
        """Imports that wait for a lookup are `wanted`."""
        return 0 if self._fetches is None else self._fetches.num_running

    def ask(self, wanted: WantedPrefix) -> StoreSource | None:
        groups = wanted.groups
        names = groups.full_names(wanted.hashes) if groups.num_full else []
        num_here = next((i for i, name in enumerate(names) if not wanted.is_here(name)), len(names))
        num_here -= num_here % max(1, groups.num_full)
        missing = names[num_here:]
        if not missing:
            return None
        if self._tier.is_away:
            self._tier.probe(missing[0])
            return None
        num_turns = 1 if self._fetches is None else 2

        def turn_s(num_blocks: int) -> float:
            num_rows = (num_here + num_blocks) // groups.num_full
            return wanted.compute_s(max(0, num_rows - wanted.num_here)) / num_turns

        may_take_s = turn_s(len(missing))
        if self._tier.predicted_s(len(missing)) >= may_take_s:
            return None
        ends = []
        if groups.num_states:  # a prefix is of use where a state was saved; its blocks come later
            first_row = num_here // groups.num_full
            ends = [
                (number * groups.num_full, groups.state_names(each)[-1])
                for number, each in enumerate(wanted.hashes[first_row:], 1)
            ]
        fetch = self._tier.lookup(missing, turn_s, ends)
        tier, write_block = self._tier, self._write_block
        return StoreSource(
            tier, write_block, self._fetches, wanted, names, num_here, fetch, may_take_s
        )

    def poll(self) -> list[tuple[RankedFetch, str | None]]:
        self._tier.poll()
        ended = [] if self._fetches is None else self._fetches.take_ended()
        for fetch in ended:
            if fetch.error is not None:
                self._tier.forget(fetch.names)
        return [(fetch, fetch.error) for fetch in ended]


class KVOffload:
    """Copies blocks of an engine's cache to host memory and to the store.

    Args:
        read_blocks: returns the bytes of blocks by block id, or functions that return them in the
            store's thread.
    """

    def __init__(
        self,
        engine: Engine,
        host: HostTier | None,
        cold: ColdTier | None,
        read_blocks: Callable[[SequenceOf[int]], SequenceOf[Block]],
    ) -> None:
        self._engine = engine
        self._host = host
        self._cold = cold
        self._read_blocks = read_blocks
        if host is not None or cold is not None:
            engine.save_evicted = self.save_evicted

    def save(self, events: Iterable[KVEvent], ended: Iterable[TokenEvent]) -> None:
        """Copy the blocks that a step has added to the cache.

        Args:
            ended: the last events of sequences. Their blocks become the most recently used in
                host memory, and the first block of each the most recent one. The blocks of one with
                `InvalidLogits` may be the reason, so they are forgotten.
        """
        if self._host is None:
            return
        pool, groups = self._engine.pool, self._engine.pool.groups
        stored = [each for event in events if event.kind == "stored" for each in event.block_hashes]
        names = [name for each in stored for name in groups.names_of(each)]
        self._host.save([(block_id, name) for name in names for block_id in pool.match((name,))])
        for event in ended:
            is_bad = isinstance(event.error, InvalidLogits)
            every = groups.every_name(event.sequence.block_hashes)
            (self._host.forget if is_bad else self._host.touch)(every)

    def save_evicted(self, evicted: list[tuple[int, BlockHash]]) -> None:
        """Save blocks that are about to be overwritten. The engine calls it.

        Blocks that are in host memory are not stored now; the host tier stores them when it evicts
        them.
        """
        if self._host is not None:
            evicted = [each for each in evicted if each[1] not in self._host]
        if self._cold is not None:
            self._cold.offer(evicted, self._read_blocks)
