"""The prefix index: for every block hash, the set of workers that have the block cached.

Fed by each worker's snapshot and KV events. `match` may be out of date (a block may be evicted
before the request arrives); that costs time, never correctness.

Names are kept with the number of a set (`block_names.py`), and each set once, as a bit mask of
workers: many blocks are cached by the same ones. Bounded in blocks, those of lost workers included;
when full, the oldest are evicted. A lost worker's bit is ignored at once; it is cleared from a few
sets at a time while other workers report, and reused only after that. No call takes long.

Sets of several workers are bounded too. Where there is no room for one more, a name that another
worker stores keeps the set that it has, and one that a worker removes is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from disagg.blocks import BlockHash
from disagg.messages import KVEvent
from disagg.router.block_names import NUM_SHARDS, BlockNames, LeadingNames, new_block_names

DEFAULT_NBYTES = 1 << 30  # of names
SETS_AT_ONCE = 64  # looked at beside a report
NUM_SETS_BEFORE_SWEEP = 4096
SET_NBYTES = 180  # of a set without its mask: an integer's header, a place in a dict and in a list
SETS_SHARE = 4  # sets take at most this part of the bytes that names may take, beside them


class PrefixIndex:
    """Holds at most `max_nbytes` of names, and a quarter as much of sets.

    Attributes:
        max_num_blocks: the room for names.
        num_evicted: names that were evicted for want of room, so far.
    """

    def __init__(
        self,
        max_nbytes: int = DEFAULT_NBYTES,
        new_names: Callable[[int], BlockNames] = new_block_names,
    ) -> None:
        self._new_names = partial(new_names, max_nbytes)
        self._max_sets_nbytes = max_nbytes // SETS_SHARE
        self.num_evicted = 0
        self._clear()
        self.max_num_blocks = self._names.max_names

    def _clear(self) -> None:
        self._names = self._new_names()
        self._masks = [0]  # by set
        self._sets: dict[int, int] = {0: 0}  # by mask
        self._free_sets: list[int] = []
        self._dead_sets: list[int] = []  # whose workers are all lost; some name may still have them
        self._num_to_purge = 0  # shards that may have such names
        self._next_set, self._next_shard = 1, 0  # to be swept, to be purged
        self._sweeps_at = self._max_num_sets = NUM_SETS_BEFORE_SWEEP
        self._is_sweeping = False
        self._bits: dict[str, int] = {}
        self._workers: dict[int, str] = {}  # by the place of their bit
        self._alive = 0  # all bits of workers
        self._gone = 0  # bits of lost workers, which masks may still contain
        self._leaving = 0  # of these, those that this sweep clears
        self._free_bits: list[int] = []
        self._num_bits = 0

    @property
    def num_blocks(self) -> int:
        return self._names.num_names

    @property
    def num_bits(self) -> int:
        """Bits of the masks: those in use, and those that will be used again."""
        return self._num_bits

    @property
    def num_sets(self) -> int:
        """Different sets of workers."""
        return len(self._masks) - len(self._free_sets)

    @property
    def nbytes(self) -> int:
        return self._names.nbytes + self.num_sets * (SET_NBYTES + self._num_bits // 7)

    def places(self, *worker_ids: str) -> tuple[int, ...]:
        """The places of the bits of the known workers. They hold until a worker's next snapshot."""
        bits = self._bits
        return tuple([bits[each].bit_length() - 1 for each in worker_ids if each in bits])

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """The number of leading blocks that each worker has cached, if it has at least one."""
        workers, (depths, places, number) = self._workers, self.find(block_hashes)
        return {workers[place]: depths[place] for place in places[:number]}

    def find(self, block_hashes: Sequence[BlockHash]) -> LeadingNames:
        """As `match`, but by `places` of workers. The result holds until the next call."""
        return self._names.match(block_hashes, self._alive)

    def deepest(self, found: LeadingNames, among: int, turn: float, most: int) -> list[int]:
        """Places of up to `most` workers that have the first block; those with most come first.

        Args:
            among: a mask of the places to choose from.
            turn: a fraction from 0 to 1 that selects the first of equal workers.
        """
        return self._names.deepest(found, among, turn, most)

    def snapshot(self, worker_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """The worker has exactly these blocks cached."""
        self.drop(worker_id)
        self._sweep()
        bit = self._free_bits.pop() if self._free_bits else self._new_bit()
        self._bits[worker_id] = bit
        self._workers[bit.bit_length() - 1] = worker_id
        self._alive |= bit
        self._stored(bit, tuple(block_hashes))

    def apply(self, worker_id: str, events: Iterable[KVEvent]) -> None:
        """Apply a worker's changes since its snapshot, in order. Unknown workers are ignored."""
        if worker_id not in self._bits:
            return
        self._sweep()
        for event in events:
            if event.kind == "stored":
                self._stored(self._bits[worker_id], event.block_hashes)
            else:
                self._removed(self._bits[worker_id], event.block_hashes)

    def drop(self, worker_id: str) -> None:
        """Forget a lost worker."""
        bit = self._bits.pop(worker_id, 0)
        if bit:
            del self._workers[bit.bit_length() - 1]
            self._alive &= ~bit
            self._gone |= bit
            if not self._alive:
                self._clear()

    def _new_bit(self) -> int:
        bit = 1 << self._num_bits
        self._num_bits += 1
        nbytes = SET_NBYTES + self._num_bits // 3  # each mask is kept twice, with room to grow
        self._max_num_sets = max(self._max_sets_nbytes // nbytes, NUM_SETS_BEFORE_SWEEP)
        self._sweeps_at = min(self._sweeps_at, self._max_num_sets)
        return bit

    def _stored(self, bit: int, block_hashes: Sequence[BlockHash]) -> None:
        masks, alive, is_changed = self._masks, self._alive, False
        runs = self._names.sets_of(block_hashes)
        for place, (number, end) in enumerate(runs):
            mask = masks[number]
            if not mask & bit:
                runs[place] = self._set_of(mask & alive | bit) or number, end
                is_changed = True
        if is_changed:
            self.num_evicted += self._names.put(block_hashes, runs)

    def _removed(self, bit: int, block_hashes: Sequence[BlockHash]) -> None:
        masks, others, is_changed = self._masks, self._alive & ~bit, False
        runs, begin = self._names.sets_of(block_hashes), 0
        for place, (number, end) in enumerate(runs):
            left = masks[number] & others
            if number and left != masks[number]:
                known = self._set_of(left)
                self.num_evicted += end - begin if left and not known else 0
                runs[place] = known, end
                is_changed = True
            begin = end
        if is_changed:
            self._names.put(block_hashes, runs)

    def _set_of(self, mask: int) -> int:
        """The number of the set of these workers; 0: there is no room for one more."""
        number = self._sets.get(mask)
        if number is None:
            if mask & (mask - 1) and self.num_sets >= self._max_num_sets:
                return 0
            number = self._free_sets[-1] if self._free_sets else len(self._masks)
            try:
                self._names.keep(number, mask)
            except MemoryError:  # a worse hint to the router, and not the end of a worker's link
                return 0
            if self._free_sets:
                self._masks[self._free_sets.pop()] = mask
            else:
                self._masks.append(mask)
            self._sets[mask] = number
        return number

    def _sweep(self) -> None:
        """Go on clearing lost workers, and sets and names that nobody needs any more."""
        if self._num_to_purge:
            self._names.purge(self._next_shard)
            self._next_shard = (self._next_shard + 1) % NUM_SHARDS
            self._num_to_purge -= 1
        if not self._is_sweeping:
            if not self._gone and not self._dead_sets and self.num_sets < self._sweeps_at:
                return
            self._is_sweeping, self._leaving, self._next_set = True, self._gone, 1
        first = self._next_set
        counts = self._names.counts(first, min(SETS_AT_ONCE, len(self._masks) - first))
        for number, num_names in enumerate(counts, first):
            self._clean_set(number, num_names)
        self._next_set = first + len(counts)
        if self._next_set == len(self._masks):
            self._end_sweep()

    def _clean_set(self, number: int, num_names: int) -> None:
        mask = self._masks[number]
        if not mask:  # free or dead
            return
        left = mask & ~self._leaving
        if num_names and left == mask:
            return
        if self._sets.get(mask) == number:
            del self._sets[mask]
        self._masks[number] = left if num_names else 0
        self._names.keep(number, self._masks[number])
        if not num_names:
            self._free_sets.append(number)
        elif left:
            self._sets.setdefault(left, number)
        else:
            self._names.kill(number)
            self._dead_sets.append(number)
            self._num_to_purge = NUM_SHARDS

    def _end_sweep(self) -> None:
        self._is_sweeping = False
        self._sweeps_at = min(2 * self.num_sets + NUM_SETS_BEFORE_SWEEP, self._max_num_sets)
        self._free_bits += _bits_of(self._leaving)  # no mask contains them any more
        self._gone &= ~self._leaving
        self._leaving = 0
        dead, self._dead_sets = self._dead_sets, []
        for number in dead:
            (num_names,) = self._names.counts(number, 1)
            if num_names:
                self._dead_sets.append(number)
            else:
                self._names.kill(number, is_dead=False)
                self._free_sets.append(number)


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
