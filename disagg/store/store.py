"""The interface of stores for evicted blocks. A store is a cache: lost blocks are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disagg.blocks import BlockHash


class ColdStore(Protocol):
    """Blocks by name, of one KV layout. Used by one thread at a time; may wait on a network.

    Stores of different layouts never share blocks, even on one server. The caller
    bounds the bytes of a call. Every method but `close` raises `errors.Unavailable`, at once or
    within the store's own time limit, while the store cannot be reached.
    """

    num_damaged: int  # values that were read with a wrong digest

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """The intact bytes that were stored under each key, or None."""
        ...

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        """Store blocks, at least for a moment; the least recently used are evicted first."""
        ...

    def contains_prefix(self, keys: Sequence[BlockHash]) -> int:
        """How many leading keys are stored. They may be evicted before the next call."""
        ...

    def close(self) -> None: ...
