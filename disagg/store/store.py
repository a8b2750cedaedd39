"""The interface of stores for evicted blocks. A store is a cache: lost blocks are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disagg.blocks import BlockHash


class ColdStore(Protocol):
    """Blocks by name, of one KV layout. Used by one thread at a time; may wait on a network.

    A store of another layout never sees these blocks, whatever it shares with this one. The caller
    bounds the bytes of a call. Every method but `close` raises `errors.Unavailable`, at once or
    within the store's own time limit, while the store cannot be reached.
    """

    num_damaged: int  # values that came back as something else than was put

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """The bytes that were put under each key, intact, or None."""
        ...

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        """Keep these, at least for a moment; the least recently used go first."""
        ...

    def contains_prefix(self, keys: Sequence[BlockHash]) -> int:
        """How many leading keys are there. They may be gone by the next call."""
        ...

    def close(self) -> None: ...
