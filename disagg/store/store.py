"""The interface of stores for evicted blocks. A store is a cache: lost blocks are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disagg.blocks import BlockHash


class ColdStore(Protocol):
    """Blocks by name, of one KV layout. Used by one thread at a time; may wait on a network.

    Of a worker with several ranks, each rank has a store of its own, which puts and gets the rank's
    part of each block. Stores of different layouts never share blocks, even on one server. The
    caller bounds the bytes of a call. Every method but `close` raises `errors.Unavailable`, at once
    or within the store's own time limit, while the store cannot be reached.
    """

    num_damaged: int  # values that were read with a wrong digest

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """The intact bytes under each key, or None if some are missing."""
        ...

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        """Store blocks, at least for a moment; the least recently used are evicted first."""
        ...

    def contains_prefix(self, keys: Sequence[BlockHash]) -> int:
        """How many leading keys are stored, by all ranks. They may be evicted before the next
        call."""
        ...

    def close(self) -> None: ...
