"""Which worker holds which blocks: one bit per worker under every block's name.

Fed by each worker's snapshot and the events after it. The answer to `match` is a belief (a block
may be gone when the request arrives); a wrong one costs time, never correctness.

Bounded in bytes: when full, the blocks that no request asked for longest are dropped, the tail of
a prefix before its head. Losing a worker only forgets its bit; names that nobody holds any more
leave by the same bound, and bits are renumbered once many have been used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from disagg.blocks import BlockHash
from disagg.messages import KVEvent

ENTRY_NBYTES = 256  # measured: name, mask, and their place in the ordered dict
MAX_NUM_BITS = 512  # used ones, before they are renumbered


class PrefixIndex:
    """Holds at most `max_nbytes` of memory."""

    def __init__(self, max_nbytes: int = 256 << 20) -> None:
        self._max_num_blocks = max(1, max_nbytes // ENTRY_NBYTES)
        self._holders: OrderedDict[BlockHash, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._workers: dict[int, str] = {}
        self._alive = 0  # all bits in use
        self._num_bits_used = 0

    @property
    def nbytes(self) -> int:
        return len(self._holders) * ENTRY_NBYTES

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For every worker that holds at least the first block: how many leading blocks it does."""
        holders = self._holders
        leading: dict[str, int] = {}
        remaining = self._alive
        if not remaining:
            return leading
        depth = 0
        held_by = holders.get
        for block_hash in block_hashes:
            still = held_by(block_hash, 0) & remaining
            if still != remaining:
                if depth:
                    self._record(leading, remaining ^ still, depth)
                remaining = still
                if not still:
                    break
            depth += 1
        if depth and remaining:
            self._record(leading, remaining, depth)
        touch = holders.move_to_end
        for block_hash in reversed(block_hashes[:depth]):
            touch(block_hash)
        return leading

    def snapshot(self, worker_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """The worker holds these and nothing else."""
        self.drop(worker_id)
        self._add_worker(worker_id)
        self._stored(worker_id, block_hashes)

    def apply(self, worker_id: str, events: Iterable[KVEvent]) -> None:
        """What changed on a worker since its snapshot, in order. Unknown workers are ignored."""
        if worker_id not in self._bits:
            return
        for event in events:
            if event.kind == "stored":
                self._stored(worker_id, event.block_hashes)
            elif event.kind == "removed":
                self._removed(worker_id, event.block_hashes)
            else:
                self.snapshot(worker_id, ())

    def drop(self, worker_id: str) -> None:
        """The worker holds nothing any more."""
        bit = self._bits.pop(worker_id, 0)
        if bit:
            del self._workers[bit]
            self._alive &= ~bit

    def _add_worker(self, worker_id: str) -> None:
        if self._num_bits_used >= MAX_NUM_BITS + len(self._bits):
            self._renumber()
        bit = 1 << self._num_bits_used
        self._num_bits_used += 1
        self._bits[worker_id] = bit
        self._workers[bit] = worker_id
        self._alive |= bit

    def _stored(self, worker_id: str, block_hashes: Iterable[BlockHash]) -> None:
        bit, alive, holders = self._bits[worker_id], self._alive, self._holders
        for block_hash in block_hashes:
            holders[block_hash] = holders.get(block_hash, 0) & alive | bit
        while len(holders) > self._max_num_blocks:
            holders.popitem(last=False)

    def _removed(self, worker_id: str, block_hashes: Iterable[BlockHash]) -> None:
        others = self._alive & ~self._bits[worker_id]
        holders = self._holders
        for block_hash in block_hashes:
            left = holders.get(block_hash, 0) & others
            if left:
                holders[block_hash] = left
            else:
                holders.pop(block_hash, None)

    def _record(self, leading: dict[str, int], mask: int, depth: int) -> None:
        while mask:
            bit = mask & -mask
            leading[self._workers[bit]] = depth
            mask ^= bit

    def _renumber(self) -> None:
        """Give the living workers the lowest bits, and drop names that nobody holds."""
        places = {bit: 1 << place for place, bit in enumerate(self._workers)}
        for _ in range(len(self._holders)):
            block_hash, mask = self._holders.popitem(last=False)
            mask &= self._alive
            renumbered = 0
            while mask:
                bit = mask & -mask
                renumbered |= places[bit]
                mask ^= bit
            if renumbered:
                self._holders[block_hash] = renumbered
        self._workers = {places[bit]: worker_id for bit, worker_id in self._workers.items()}
        self._bits = {worker_id: bit for bit, worker_id in self._workers.items()}
        self._num_bits_used = len(self._workers)
        self._alive = (1 << self._num_bits_used) - 1
