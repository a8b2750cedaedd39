"""The interface of stores for evicted blocks. A store is a cache: lost blocks are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disagg.blocks import BlockHash


class ColdStore(Protocol):
    """Blocks of one KV layout by hash. It is used by one thread, and may wait for a network.

    Each rank of a worker has its own store, which puts and gets the rank's part of each block.
    Stores with different layouts never share blocks, even on one server. The caller limits the
    bytes of a call. While the store is unreachable, every method except `close` raises
    `errors.Unavailable`, at once or within the store's time limit.
    """

    num_damaged: int  # number of values that were read with a wrong digest

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """The bytes under each key, or None if they are missing or damaged."""
        ...

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        """Store blocks. The least recently used ones are evicted first."""
        ...

    def contains_prefix(self, keys: Sequence[BlockHash]) -> int:
        """Number of leading keys that all ranks have stored. They may be evicted at any time."""
        ...

    def close(self) -> None: ...
