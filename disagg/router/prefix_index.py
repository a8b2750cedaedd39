"""The prefix index: for every block hash, the set of workers that have the block cached.

Fed by each worker's snapshot and KV events. It may be out of date (a block may be evicted before
the request arrives); that costs time, never correctness.

A set of workers is a bit mask, and blocks of the same workers share it. A worker evicts the end of
a prefix before its beginning, so it has a block only if it has those before it. How much of a
prompt it has is therefore found by bisection: long prompts take hardly longer than short ones.
(Blocks that a worker evicts with their neighbours, `block_pool.EXTENT_TOKENS`, may be an exception;
then it has less than it seems.)

Of a model with recurrent states a worker can go on only where it has a state, too, of which it
tells with marked names (`KVGroups.reported`). Such rows are few, and anywhere in a prompt.

Bounded in blocks, those of lost workers included. When full, it forgets the oldest, and first of
all those of a single worker. A lost worker's bit is ignored at once; it is cleared from a few
shards at a time while other workers report, and used again only after that. No call takes long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from disagg.blocks import BlockHash
from disagg.kv_groups import STATE_MARK
from disagg.messages import KVEvent

DEFAULT_NBYTES = 1 << 30
NUM_SHARDS = 1024  # dicts, so that growing and sweeping touch few blocks at a time
# A hash with its header as the allocator rounds it up, and a dict that has just grown, which has
# six slots per block.
BLOCK_NBYTES = 64 + 6 * 20
SHARDS_AT_ONCE, BLOCKS_AT_ONCE = 64, 1024  # cleared of lost workers beside a report
NUM_OLDEST = 16  # blocks of a shard among which those that are forgotten are chosen
MAX_MASKS = 1 << 16  # different masks that blocks share; more are kept per block


class PromptHolders:
    """Which workers have how much of one prompt. Valid until the index changes."""

    def __init__(
        self,
        shards: Sequence[dict[BlockHash, int]],
        hashes: Sequence[BlockHash],
        has_states: bool,
    ) -> None:
        self._shards = shards
        self._hashes = hashes
        self._masks: list[int | None] = [None] * len(hashes)  # None: not looked up yet
        self._with_states = self._rows_with_states() if has_states else None

    def depths(self, workers: Iterable[int]) -> list[int]:
        """The number of leading blocks after which each worker can go on, by its bit."""
        if (rows := self._with_states) is not None:
            return [next((depth for depth, mask in rows if mask & bit), 0) for bit in workers]
        look_up, masks, num_blocks = self._look_up, self._masks, len(self._hashes)
        depths = []
        for bit in workers:
            low, high = 0, num_blocks if bit else 0
            while low < high:
                middle = (low + high) // 2
                mask = masks[middle]
                if mask is None:
                    mask = look_up(middle)
                if mask & bit:
                    low = middle + 1
                else:
                    high = middle
            depths.append(low)
        return depths

    def deepest(self, among: int, most: int, turn: float) -> list[int]:
        """The bits of up to `most` workers of the mask `among` that have the first block, those
        that have most of the prompt first.

        Args:
            turn: a fraction from 0 to 1 that selects the first of equal workers.
        """
        chosen, most_blocks = list[int](), len(self._hashes)
        while len(chosen) < most:
            low, equal = self._deepest_of(among, most_blocks)
            if not equal:
                break
            later = equal >> (start := int(turn * equal.bit_length())) << start
            in_turn = chain(_bits_of(later), _bits_of(equal ^ later))
            chosen += islice(in_turn, most - len(chosen))
            among, most_blocks = among ^ equal, low - 1  # the others have less
        return chosen

    def _deepest_of(self, among: int, most_blocks: int) -> tuple[int, int]:
        """The largest number of leading blocks that workers of a mask have, up to `most_blocks`,
        and the mask of these workers."""
        if (rows := self._with_states) is not None:
            of_rows = ((depth, mask & among) for depth, mask in rows if depth <= most_blocks)
            return next((each for each in of_rows if each[1]), (0, 0))
        low, high, equal = 0, most_blocks, 0
        while low < high:
            middle = (low + high) // 2
            mask = self._masks[middle]
            if holders := (self._look_up(middle) if mask is None else mask) & among:
                low, equal = middle + 1, holders
            else:
                high = middle
        return low, equal

    def _look_up(self, number: int) -> int:
        mask = self._masks[number] = self._mask_of(self._hashes[number])
        return mask

    def _mask_of(self, name: BlockHash) -> int:
        return self._shards[hash(name) % NUM_SHARDS].get(name, 0)

    def _rows_with_states(self) -> list[tuple[int, int]]:
        """The rows after which workers can go on: how many there are up to each, and the mask; the
        deepest first."""
        masks = (self._mask_of(each + STATE_MARK) & self._mask_of(each) for each in self._hashes)
        found = [(number, mask) for number, mask in enumerate(masks, 1) if mask]
        return found[::-1]


class PrefixIndex:
    """Holds about `max_nbytes` of block hashes, and the masks that they share.

    Attributes:
        max_num_blocks: the largest number of blocks.
        num_blocks: of these, how many there are, those of lost workers included until they are
            swept out.
        num_evicted: blocks of present workers that were forgotten for want of room, so far.
    """

    def __init__(self, max_nbytes: int = DEFAULT_NBYTES) -> None:
        self.max_num_blocks = max(1, max_nbytes // BLOCK_NBYTES)
        self.num_blocks = self.num_evicted = 0
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._masks: dict[int, int] = {}  # one object for each mask
        self._next_full = 0  # the shard in which room is made next
        self._bits: dict[str, int] = {}
        self._alive = 0  # all bits of workers
        self._gone = 0  # bits of lost workers, which masks may still contain
        self._leaving = 0  # of these, those that this sweep clears
        self._num_to_sweep = 0  # shards that may still contain those
        self._free_bits: list[int] = []
        self.num_bits = 0  # of masks: those in use, and those that will be used again

    @property
    def nbytes(self) -> int:
        nbytes = sum(map(sys.getsizeof, (*self._shards, self._masks, *self._masks)))
        return nbytes + 64 * self.num_blocks

    def bit(self, worker_id: str) -> int:
        """The bit of a worker until its next snapshot; 0: it is not known."""
        return self._bits.get(worker_id, 0)

    def find(self, block_hashes: Sequence[BlockHash], *, has_states: bool = False) -> PromptHolders:
        """Look a prompt up. has_states: whether its model has recurrent states."""
        return PromptHolders(self._shards, block_hashes, has_states)

    def snapshot(self, worker_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """The worker has exactly these blocks cached."""
        self.drop(worker_id)
        self._sweep()
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self.num_bits
            self.num_bits += 1
        self._bits[worker_id] = bit
        self._alive |= bit
        self._store(bit, block_hashes)

    def apply(self, worker_id: str, events: Iterable[KVEvent]) -> None:
        """Apply a worker's changes since its snapshot, in order. Unknown workers are ignored.

        Reports without changes, too, help to clear lost workers.
        """
        bit = self._bits.get(worker_id)
        if bit is None:
            return
        self._sweep()
        for event in events:
            if event.kind == "stored":
                self._store(bit, event.block_hashes)
            else:
                self._remove(bit, event.block_hashes)

    def drop(self, worker_id: str) -> None:
        """Forget a lost worker."""
        bit = self._bits.pop(worker_id, 0)
        self._alive &= ~bit
        self._gone |= bit

    def _store(self, bit: int, block_hashes: Iterable[BlockHash]) -> None:
        before = after = 0
        for block in block_hashes:
            shard = self._shards[hash(block) % NUM_SHARDS]
            mask = shard.get(block)
            if mask is None:
                while self.num_blocks >= self.max_num_blocks:
                    self._make_room()
                self.num_blocks += 1
                shard[block] = bit
            elif not mask & bit:
                if mask is not before:  # as a rule several blocks in a row have the same workers
                    before, after = mask, self._shared(mask & self._alive | bit)
                shard[block] = after

    def _remove(self, bit: int, block_hashes: Iterable[BlockHash]) -> None:
        others = self._alive & ~bit
        for block in block_hashes:
            shard = self._shards[hash(block) % NUM_SHARDS]
            mask = shard.get(block, 0)
            if not mask & bit:
                continue
            if mask & others:
                shard[block] = self._shared(mask & others)
            else:
                del shard[block]
                self.num_blocks -= 1

    def _shared(self, mask: int) -> int:
        """The object that all blocks with this mask share."""
        if len(self._masks) >= MAX_MASKS:
            self._masks = {}
        return self._masks.setdefault(mask, mask)

    def _make_room(self) -> None:
        """Forget some of the oldest blocks of the next shard: those of a single worker, or one."""
        shard = self._shards[self._next_full]
        self._next_full = (self._next_full + 1) % NUM_SHARDS
        oldest = {block: mask & self._alive for block, mask in islice(shard.items(), NUM_OLDEST)}
        of_one = [block for block, mask in oldest.items() if not mask & (mask - 1)]
        forgotten = of_one or [*oldest][:1]
        for block in oldest:
            shard[block] = shard.pop(block)  # as if it were new
        for block in forgotten:
            del shard[block]
            self.num_blocks -= 1
            self.num_evicted += oldest[block] > 0

    def _sweep(self) -> None:
        """Clear the bits of lost workers from a few shards more."""
        if not self._num_to_sweep:
            if not self._gone:
                return
            self._leaving, self._num_to_sweep = self._gone, NUM_SHARDS
        last, num_blocks = max(0, self._num_to_sweep - SHARDS_AT_ONCE), 0
        while self._num_to_sweep > last and num_blocks < BLOCKS_AT_ONCE:
            self._num_to_sweep -= 1
            num_blocks += self._clear_leaving(self._num_to_sweep)
        if not self._num_to_sweep:
            self._free_bits += _bits_of(self._leaving)  # no mask contains them any more
            self._gone ^= self._leaving

    def _clear_leaving(self, number: int) -> int:
        """Clear the bits that are leaving from a shard. Returns how many blocks it had."""
        shard, leaving = self._shards[number], self._leaving
        left = {
            block: self._shared(mask & ~leaving) if mask & leaving else mask
            for block, mask in shard.items()
            if mask & ~leaving
        }
        self.num_blocks -= len(shard) - len(left)
        self._shards[number] = left
        return len(shard)


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
