"""The prefix index: for every block hash, a bit mask of the workers that have the block cached.

Fed by each worker's snapshot and KV events. `match` may be out of date (a block may be evicted
before the request arrives); that costs time, never correctness.

Hashes are spread over 256 dicts by their first byte, so that growing a dict, evicting hashes and
clearing bits of lost workers each touch one small dict at a time, and no call takes long.

Bounded in bytes. When full, the oldest hashes are evicted, except that those matched since get a
second chance (CLOCK, an approximation of LRU; Corbató, 1968). A lost worker's bit is ignored at
once; it is cleared dict by dict while other workers report, and reused only after that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import islice

from disagg.blocks import BlockHash
from disagg.messages import KVEvent

NUM_SHARDS = 256  # one for each first byte
NAME_NBYTES = 64  # 16 bytes, their header, and what the allocator rounds up to
# A hash and its place in a dict that has just grown to six places per hash; usually less.
ENTRY_NBYTES = NAME_NBYTES + 6 * 20
EVICTED_AT_ONCE = 1 / 64  # of a shard
MAX_NUM_MASKS = 1 << 12  # that entries share
ASKED = 1  # the bit of a hash that was matched since the last eviction


class PrefixIndex:
    """Holds at most `max_nbytes` of memory."""

    def __init__(self, max_nbytes: int = 256 << 20) -> None:
        self._max_num_blocks = max(1, max_nbytes // ENTRY_NBYTES)
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._masks: dict[int, int] = {}
        self._num_blocks = 0
        self._hand = 0  # the shard in which room is made next
        self._bits: dict[str, int] = {}
        self._workers: dict[int, str] = {}
        self._alive = 0  # all bits of workers
        self._gone = 0  # bits of lost workers, which masks may still contain
        self._leaving = 0  # of these, those that this sweep removes
        self._num_swept = 0  # shards
        self._free_bits: list[int] = []
        self._num_bits = 1

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_bits(self) -> int:
        """Bits of the masks: those in use, and those that will be used again."""
        return self._num_bits

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self._shards)) + NAME_NBYTES * self._num_blocks

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many leading blocks each worker has cached, of workers that have at least one."""
        leading: dict[str, int] = {}
        remaining = self._alive
        if not remaining:
            return leading
        shards = self._shards
        unasked: list[BlockHash] = []
        before = -1  # the mask of the block before; equal masks are the same object
        for depth, block_hash in enumerate(block_hashes):
            mask = shards[block_hash[0]].get(block_hash, 0)
            if mask is before:
                continue
            still = mask & remaining
            if still != remaining:
                self._record(leading, remaining ^ still, depth)
                remaining = still
                if not still:
                    break
            if mask & ASKED:
                before = mask
            else:
                unasked.append(block_hash)
        else:
            self._record(leading, remaining, len(block_hashes))
        for block_hash in unasked:
            shard = shards[block_hash[0]]
            shard[block_hash] = self._shared(shard[block_hash] | ASKED)
        return leading

    def snapshot(self, worker_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """The worker has exactly these blocks cached."""
        self.drop(worker_id)
        self._sweep()
        bit = self._free_bits.pop() if self._free_bits else self._new_bit()
        self._bits[worker_id] = bit
        self._workers[bit] = worker_id
        self._alive |= bit
        self._stored(bit, block_hashes)

    def apply(self, worker_id: str, events: Iterable[KVEvent]) -> None:
        """Apply a worker's changes since its snapshot, in order. Unknown workers are ignored."""
        if worker_id not in self._bits:
            return
        if self._gone:
            self._sweep()
        for event in events:
            if event.kind == "stored":
                self._stored(self._bits[worker_id], event.block_hashes)
            else:
                self._removed(self._bits[worker_id], event.block_hashes)

    def drop(self, worker_id: str) -> None:
        """Forget a lost worker."""
        bit = self._bits.pop(worker_id, 0)
        if not bit:
            return
        del self._workers[bit]
        self._alive &= ~bit
        self._gone |= bit
        if not self._alive:
            self._shards = [{} for _ in range(NUM_SHARDS)]
            self._num_blocks = 0
            self._give_back(self._gone)

    def _new_bit(self) -> int:
        bit = 1 << self._num_bits
        self._num_bits += 1
        return bit

    def _stored(self, bit: int, block_hashes: Iterable[BlockHash]) -> None:
        shards, known = self._shards, self._alive | ASKED
        for block_hash in block_hashes:
            shard = shards[block_hash[0]]
            mask = shard.get(block_hash)
            if mask is None:
                shard[block_hash] = bit
                self._num_blocks += 1
            elif not mask & bit:
                shard[block_hash] = self._shared(mask & known | bit)
        if self._num_blocks > self._max_num_blocks:
            self._make_room()

    def _removed(self, bit: int, block_hashes: Iterable[BlockHash]) -> None:
        others = self._alive & ~bit
        for block_hash in block_hashes:
            shard = self._shards[block_hash[0]]
            mask = shard.get(block_hash, 0)
            if mask & others:
                shard[block_hash] = self._shared(mask & (others | ASKED))
            elif mask:
                del shard[block_hash]
                self._num_blocks -= 1

    def _make_room(self) -> None:
        """Evict the oldest hashes of one shard after the other until there is room."""
        while self._num_blocks > self._max_num_blocks:
            shard = self._shards[self._hand]
            self._hand = (self._hand + 1) % NUM_SHARDS
            for block_hash in list(islice(shard, math.ceil(len(shard) * EVICTED_AT_ONCE))):
                mask = shard.pop(block_hash)
                if mask & ASKED:
                    shard[block_hash] = self._shared(mask ^ ASKED)  # as the newest
                else:
                    self._num_blocks -= 1

    def _sweep(self) -> None:
        """Clear the bits of lost workers in one shard; after the last shard, they are free."""
        if not self._leaving:
            self._leaving, self._num_swept = self._gone, 0
            if not self._leaving:
                return
        shard, alive, leaving = self._shards[self._num_swept], self._alive, self._leaving
        touched = [(name, mask) for name, mask in shard.items() if mask & leaving]
        num_before = len(shard)
        for block_hash, mask in touched:
            if mask & alive:
                shard[block_hash] = self._shared(mask & (alive | ASKED))
            else:
                del shard[block_hash]
        self._num_blocks -= num_before - len(shard)
        if len(shard) < num_before // 2:
            self._shards[self._num_swept] = dict(shard.items())  # a dict never becomes smaller
        self._num_swept += 1
        if self._num_swept == NUM_SHARDS:
            self._give_back(self._leaving)

    def _give_back(self, bits: int) -> None:
        """Free bits that no mask contains any more."""
        self._free_bits += _bits_of(bits)
        self._gone &= ~bits
        self._leaving = 0

    def _shared(self, mask: int) -> int:
        """The same number as one object for all entries, which saves memory."""
        if len(self._masks) >= MAX_NUM_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _record(self, leading: dict[str, int], mask: int, depth: int) -> None:
        if not depth:
            return
        workers = self._workers
        if mask in workers:  # the bit of one, as in most cases
            leading[workers[mask]] = depth
            return
        while mask:
            bit = mask & -mask
            leading[workers[bit]] = depth
            mask ^= bit


def _bits_of(mask: int) -> list[int]:
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits
