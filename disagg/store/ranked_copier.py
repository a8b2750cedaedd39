"""The copier of a worker with several ranks, each of which copies its part of every block.

A block has the same slot on all ranks, so one host tier decides for all of them. The host tier has
the block when all ranks have copied their parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from disagg.store.block_copier import BlockCopier


class RankCopier(Protocol):
    """The copier of one rank. The methods are those of `BlockCopier`."""

    def save(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def load(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def take_saved(self) -> int: ...

    def take_loaded(self) -> list[float]: ...


class RankedCopier:
    """Implements `BlockCopier` for all ranks.

    Args:
        own: the copier of the first rank.
        others: the copiers of the other ranks.
    """

    def __init__(self, own: BlockCopier, others: Sequence[RankCopier]) -> None:
        self._own = own
        self._all: list[RankCopier] = [*others, own]  # others first, as their messages take time
        self._num_saved = [0] * len(self._all)  # by rank: saves that have not ended on all ranks
        # By rank: seconds of loads that have not ended on all ranks.
        self._loaded_s: list[deque[float]] = [deque() for _ in self._all]

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        for rank in self._all:
            rank.save(pairs)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        for rank in self._all:
            rank.load(pairs)

    def take_saved(self) -> int:
        for index, rank in enumerate(self._all):
            self._num_saved[index] += rank.take_saved()
        num_saved = min(self._num_saved)
        self._num_saved = [num - num_saved for num in self._num_saved]
        return num_saved

    def take_loaded(self) -> list[float]:
        """The seconds of the slowest rank."""
        for loaded_s, rank in zip(self._loaded_s, self._all, strict=True):
            loaded_s.extend(rank.take_loaded())
        num_loaded = min(map(len, self._loaded_s))
        return [max(each.popleft() for each in self._loaded_s) for _ in range(num_loaded)]

    def read_slot(self, slot: int) -> bytes:
        """The first rank's part of a block. Other ranks read their parts when they store them."""
        return self._own.read_slot(slot)

    def close(self) -> None:
        """Close the first rank's copier. The other ranks close theirs when they end."""
        self._own.close()
