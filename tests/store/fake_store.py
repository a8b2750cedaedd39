"""A store in this process instead of Redis."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from disagg.blocks import BlockHash


class FakeStore:
    """A `ColdStore` of at most `max_nbytes` of blocks; the least recently used go first."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self.num_damaged = 0  # never
        self._nbytes = 0
        self._blocks: OrderedDict[BlockHash, bytes] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)
        return [self._blocks.get(key) for key in keys]

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        for key, block in items:
            self._nbytes += len(block) - len(self._blocks.pop(key, b""))
            self._blocks[key] = block
        while self._nbytes > self._max_nbytes:
            _, evicted = self._blocks.popitem(last=False)
            self._nbytes -= len(evicted)

    def contains(self, keys: Sequence[BlockHash]) -> list[bool]:
        return [key in self._blocks for key in keys]

    def close(self) -> None:
        self._blocks.clear()
        self._nbytes = 0
