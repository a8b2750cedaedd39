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
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from operator import and_

from disagg.blocks import BlockHash
from disagg.messages import KVEvent

NUM_SHARDS = 256  # one for each first byte
NAME_NBYTES = 64  # 16 bytes, their header, and what the allocator rounds up to
# A hash and its place in a dict that has just grown to six places per hash; usually less.
ENTRY_NBYTES = NAME_NBYTES + 6 * 20
EVICTED_AT_ONCE = 1 / 64  # of a shard
MAX_NUM_MASKS = 1 << 12  # that entries share
ASKED = 1  # the bit of a hash that was matched since the last eviction; the lowest bit
STRIDE = 64  # hashes are looked up so many at a time, until no worker has them all


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

    def bit(self, worker_id: str) -> int:
        """The worker's bit until its next snapshot; 0: it is unknown."""
        return self._bits.get(worker_id, 0)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many leading blocks each worker has cached, of workers that have at least one."""
        return dict(self.find(block_hashes).longest())

    def find(self, block_hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The same for few workers of many."""
        shards = self._shards
        holders: list[int] = []  # of the blocks so far, all of them
        last = self._alive | ASKED
        for begin in range(0, len(block_hashes), STRIDE):
            part = block_hashes[begin : begin + STRIDE]
            masks = [shards[block_hash[0]].get(block_hash, 0) for block_hash in part]
            holders += islice(accumulate(masks, and_, initial=last), 1, None)
            last = holders[-1]
            if last <= ASKED:  # nobody holds all
                del holders[bisect_left(holders, True, key=lambda mask: mask <= ASKED) :]
                break
        if holders and not holders[-1] & ASKED:
            self._ask(block_hashes[: len(holders)])
        return PrefixMatch(holders, self._bits, self._workers)

    def _ask(self, block_hashes: Sequence[BlockHash]) -> None:
        shards = self._shards
        for block_hash in block_hashes:
            shard = shards[block_hash[0]]
            mask = shard[block_hash]
            if not mask & ASKED:
                shard[block_hash] = self._shared(mask | ASKED)

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


class PrefixMatch:
    """How many leading blocks of one prompt workers hold, until the index changes.

    Args:
        holders: for each number of leading blocks from 1 on, the bits of those that hold so many;
            somebody holds the last one.
        bits, workers: of the index.
    """

    def __init__(
        self, holders: Sequence[int], bits: Mapping[str, int], workers: Mapping[int, str]
    ) -> None:
        self._holders = holders
        self._bits = bits
        self._workers = workers

    def num_blocks(self, worker_id: str) -> int:
        bit, holders = self._bits.get(worker_id, 0), self._holders
        least, most = 0, len(holders)
        while least < most:  # faster than `bisect` with a key
            middle = (least + most) // 2
            if holders[middle] & bit:
                least = middle + 1
            else:
                most = middle
        return least

    def longest(self, turn: float = 0.0, among: int = ~ASKED) -> Iterator[tuple[str, int]]:
        """Each worker that holds the first block, and how many it holds; most come first.

        Args:
            turn: from 0 to 1, where equal workers begin, for callers that take only the first few
            among: `PrefixIndex.bit` of the workers to name
        """
        holders, workers = self._holders, self._workers
        num_blocks, before = len(holders), 0
        while num_blocks:
            mask = holders[num_blocks - 1] & among
            new = mask ^ before
            if new in workers:  # it is one, as in most cases
                yield workers[new], num_blocks
            else:
                shift = int(turn * new.bit_length())
                late = new & ((1 << shift) - 1)
                for bit in chain(_bits_of(new ^ late), _bits_of(late)):
                    yield workers[bit], num_blocks
            before = mask
            num_blocks -= 1
            if num_blocks and holders[num_blocks - 1] & among == mask:
                # The bits of fewer workers are a smaller number, so the masks are in order.
                num_blocks = bisect_left(
                    holders, -mask, hi=num_blocks, key=lambda held: -(held & among)
                )


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
