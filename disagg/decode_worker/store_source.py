"""Host memory and the store as tiers of KV import: used if loading is predicted to beat computing.

A source that is slower than predicted costs at most the time of computing. Knows nothing of
devices or Redis. Owned by the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from disagg.blocks import BlockHash
from disagg.store.cold_tier import ColdTier, Fetch
from disagg.store.host_tier import HostLoad, HostTier
from disagg.store.ranked_store import RankedFetch, RankedFetches

WriteBlock = Callable[[int, bytes], None]


@dataclass(slots=True, eq=False)
class HostSource:
    """Blocks in the worker's own host memory; they may be evicted at any time."""

    tier: HostTier
    names: SequenceOf[BlockHash]
    may_take_s: float
    num_tokens: int = 0
    answer_s: float = math.inf

    def find(self, first_block: int) -> int:
        return self.tier.match(self.names[first_block:])

    def patience_s(self, num_blocks: int) -> float:
        return self.may_take_s

    def begin(self, first_block: int, into: list[int]) -> HostLoad:
        return self.tier.load(self.names[first_block : first_block + len(into)], into)

    def drop(self) -> None: ...


class HostLookup:
    """Host memory as a tier."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier

    @property
    def num_under_way(self) -> int:
        return self._tier.num_under_way

    def ask(
        self, names: SequenceOf[BlockHash], num_here: int, compute_s: Callable[[int], float]
    ) -> HostSource | None:
        self._tier.touch(names)
        num_found = self._tier.match(names[num_here:])
        may_take_s = compute_s(num_found) if num_found else 0.0
        if self._tier.predicted_s(num_found) >= may_take_s:
            return None
        return HostSource(self._tier, names[: num_here + num_found], may_take_s)

    def poll(self) -> list[tuple[HostLoad, None]]:
        return [(load, None) for load in self._tier.poll()]


@dataclass(slots=True, eq=False)
class StoreSource:
    """A lookup in the store of the blocks from `num_here` on.

    fetches: of the worker's other ranks, if it has some.
    """

    tier: ColdTier
    write_block: WriteBlock
    fetches: RankedFetches | None
    names: SequenceOf[BlockHash]
    num_here: int
    fetch: Fetch
    answer_s: float
    num_tokens: int = 0

    def find(self, first_block: int) -> int | None:
        if not self.fetch.done:
            return None
        end = self.num_here + len(self.fetch.blocks)
        return max(0, end - first_block) if first_block >= self.num_here else 0

    def patience_s(self, num_blocks: int) -> float:
        return self.answer_s

    def begin(self, first_block: int, into: list[int]) -> RankedFetch | None:
        for block_id, block in zip(
            into, self.fetch.blocks[first_block - self.num_here :], strict=True
        ):
            self.write_block(block_id, block)
        if self.fetches is None:
            return None
        return self.fetches.begin(self.names[first_block : first_block + len(into)], into)

    def drop(self) -> None:
        self.tier.cancel(self.fetch)


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

    def ask(
        self, names: SequenceOf[BlockHash], num_here: int, compute_s: Callable[[int], float]
    ) -> StoreSource | None:
        missing = names[num_here:]
        if not missing:
            return None
        if self._tier.is_away:
            self._tier.probe(missing[0])
            return None
        num_turns = 1 if self._fetches is None else 2

        def turn_s(num_blocks: int) -> float:
            return compute_s(num_blocks) / num_turns

        may_take_s = turn_s(len(missing))
        if self._tier.predicted_s(len(missing)) >= may_take_s:
            return None
        fetch = self._tier.lookup(missing, turn_s)
        return StoreSource(
            self._tier, self._write_block, self._fetches, names, num_here, fetch, may_take_s
        )

    def poll(self) -> list[tuple[RankedFetch, str | None]]:
        self._tier.poll()
        ended = [] if self._fetches is None else self._fetches.take_ended()
        for fetch in ended:
            if fetch.error is not None:
                self._tier.forget(fetch.names)
        return [(fetch, fetch.error) for fetch in ended]
