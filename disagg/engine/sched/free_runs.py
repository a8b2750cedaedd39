"""A set of integers below a bound that hands out neighbours together.

Free blocks are kept as maximal runs, indexed by both ends (so that a returned block finds its
neighbours) and by the power of two of their length (so that a run long enough is found without a
search). Does not know what a block is.
"""

from __future__ import annotations

from collections import OrderedDict


class FreeRuns:
    """A set of block ids, kept as runs; `num_free` is the number of members.

    Each operation takes O(1) time per run that it touches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = 0
        self._end_of: dict[int, int] = {}  # first member of a run -> one past its last
        self._start_of: dict[int, int] = {}  # the inverse of `_end_of`
        self._occupied = 0  # bit k: there is a run of 2^k to 2^(k+1) - 1 members
        # OrderedDict, not dict: a dict used as a queue has to scan the holes left by deletions.
        self._by_size: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_blocks.bit_length())
        ]
        if num_blocks:
            self._insert(0, num_blocks)
            self.num_free = num_blocks

    def add(self, block_id: int) -> None:
        start, end = block_id, block_id + 1
        left = self._start_of.get(start)
        if left is not None:
            self._remove(left)
            start = left
        if end in self._end_of:
            end = self._remove(end)
        self._insert(start, end)
        self.num_free += 1

    def take(self, num_blocks: int, *, apart: bool = False) -> list[int]:
        """Remove and return `num_blocks` members, in as few runs as is cheap to find.

        The set must have that many members. The smallest sufficient class of runs is used, so that
        single blocks do not split the long runs that prompts need.

        Args:
            apart: the members need not be neighbours, so take the shortest runs.
        """
        taken: list[int] = []
        while len(taken) < num_blocks:
            missing = num_blocks - len(taken)
            start = self._find(1 if apart else missing)
            end = self._remove(start)
            stop = min(end, start + missing)
            taken.extend(range(start, stop))
            if stop < end:
                self._insert(stop, end)
        self.num_free -= num_blocks
        return taken

    def runs(self) -> list[tuple[int, int]]:
        """All runs as [start, end), in order; for checks."""
        return sorted(self._end_of.items())

    def _find(self, num_blocks: int) -> int:
        """First member of a run of at least `num_blocks`; if there is none, of a longest run."""
        sufficient = (num_blocks - 1).bit_length()  # runs of this class have >= num_blocks
        larger = self._occupied >> sufficient
        if larger:
            size_class = sufficient + (larger & -larger).bit_length() - 1
        elif self._occupied:
            size_class = self._occupied.bit_length() - 1
        else:
            raise ValueError("more blocks were asked for than are free")
        return next(iter(self._by_size[size_class]))

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        size_class = (end - start).bit_length() - 1
        self._by_size[size_class][start] = None
        self._occupied |= 1 << size_class

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        size_class = (end - start).bit_length() - 1
        runs = self._by_size[size_class]
        del runs[start]
        if not runs:
            self._occupied &= ~(1 << size_class)
        return end
