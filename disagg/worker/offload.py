"""KV offload: saves blocks to host memory when they fill, and to the store when they are evicted.

It is used by the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from disagg.blocks import BlockHash
from disagg.engine.engine import Engine
from disagg.engine.sched.step import TokenEvent
from disagg.errors import InvalidLogits
from disagg.messages import KVEvent
from disagg.store.cold_tier import ColdTier
from disagg.store.host_tier import HostTier
from disagg.store.store_thread import Block


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
        stored = [name for event in events if event.kind == "stored" for name in event.block_hashes]
        match = self._engine.pool.match
        self._host.save([(block_id, name) for name in stored for block_id in match((name,))])
        for event in ended:
            is_bad = isinstance(event.error, InvalidLogits)
            (self._host.forget if is_bad else self._host.touch)(event.sequence.block_hashes)

    def save_evicted(self, evicted: list[tuple[int, BlockHash]]) -> None:
        """Save blocks that are about to be overwritten. The engine calls it.

        Blocks that are in host memory are not stored now; the host tier stores them when it evicts
        them.
        """
        if self._host is not None:
            evicted = [each for each in evicted if each[1] not in self._host]
        if self._cold is not None:
            self._cold.offer(evicted, self._read_blocks)
