"""The names of cached KV blocks, each with the number of a set of workers, in little memory.

`CompiledNames` (`csrc/block_names.cpp`) takes 25 to 40 bytes a name. `DictNames` is for
installations without a compiler; it takes 92 to 184. Sets are masks, in which each worker has the
bit that `prefix_index` gave it.
"""

from __future__ import annotations

import ctypes
import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeAlias

from disagg.blocks import HASH_NBYTES, BlockHash
from disagg.kernels.cpu.library import BLOCK_NAMES, find_library

NUM_SHARDS = 256  # so that growing and purging touch few names at a time
EVICTED_AT_ONCE = 1 / 64  # of a shard
SPARED_AT_ONCE = 4096  # beside one for each name put
_ASKED = 1  # the lowest bit of a value: it was looked up since it was last spared
# A name with its header, as the allocator rounds it up, and the number of its set.
_NAME_NBYTES = 64

# The number of a set of workers, which is the same for several names in a row, and where in the
# sequence of names they end.
Run: TypeAlias = tuple[int, int]


class LeadingNames(NamedTuple):
    """The number of leading names of a sequence that each worker has.

    depths: these numbers, by the place of the worker's bit.
    places: places of the workers that have the first name, smallest depth first.
    num_places: only this many entries of `places` are valid.
    """

    depths: Sequence[int]
    places: Sequence[int]
    num_places: int


class BlockNames(Protocol):
    """The table of the prefix index: names of `HASH_NBYTES` bytes, and sets of workers by number.

    Set 0 is empty. When there is room for no more names, the oldest are evicted, but those that
    were looked up get a second chance (CLOCK, an approximation of LRU; Corbató, 1968). Each `put`
    spares only a limited number: otherwise, if all names were looked up, it would go through the
    whole table.

    Attributes:
        ENTRY_NBYTES: most bytes of one name.
        max_names: number of names for which there is room, including those of dead sets.
    """

    ENTRY_NBYTES: int
    max_names: int

    @property
    def num_names(self) -> int:
        """The number of names without those of dead sets."""

    @property
    def nbytes(self) -> int: ...

    def keep(self, number: int, mask: int) -> None:
        """Give the set `number` the workers of these bits.

        Raises:
            MemoryError: there is not enough memory; the set does not change.
        """

    def match(self, names: Sequence[BlockHash], alive: int) -> LeadingNames:
        """Find how many leading names each worker in the mask `alive` has. The result holds until
        the next call.

        The leading names that any of them has count as looked up.
        """

    def deepest(self, found: LeadingNames, among: int, turn: float, most: int) -> list[int]:
        """Places of up to `most` workers of the mask `among`, those with the largest depth first.

        Args:
            turn: a fraction from 0 to 1 that selects the first of equal workers.
        """

    def sets_of(self, names: Sequence[BlockHash]) -> list[Run]:
        """The sets of all names."""

    def put(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        """Give names their sets, which are kept already; 0 removes them.

        Returns how many were evicted for it, without those of dead sets.
        """

    def counts(self, first: int, number: int) -> list[int]:
        """The number of names of each of `number` sets, from the set `first` on."""

    def kill(self, number: int, is_dead: bool = True) -> None:
        """Mark a set as dead, so that its names do not count and may be purged; or as alive."""

    def purge(self, shard: int) -> None:
        """Remove the names of dead sets from one of `NUM_SHARDS` shards."""


def new_block_names(max_nbytes: int) -> BlockNames:
    """The compiled ones where the installation has them."""
    library = find_library(BLOCK_NAMES).loaded
    return DictNames(max_nbytes) if library is None else CompiledNames(max_nbytes, library)


class DictNames:
    """`BlockNames` as dicts."""

    ENTRY_NBYTES = _NAME_NBYTES + 6 * 20  # a dict that has just grown has six places per name

    def __init__(self, max_nbytes: int) -> None:
        self.max_names = max(1, max_nbytes // self.ENTRY_NBYTES)
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._masks: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._dead: set[int] = set()
        self._hand = 0  # the shard in which room is made next
        self._num_spares = 0  # names that may still be spared; the last eviction may spare more
        self._num_names = 0

    @property
    def num_names(self) -> int:
        return self._num_names - sum(self._counts.get(number, 0) for number in self._dead)

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self._shards)) + _NAME_NBYTES * self._num_names

    def keep(self, number: int, mask: int) -> None:
        self._masks[number] = mask

    def match(self, names: Sequence[BlockHash], alive: int) -> LeadingNames:
        depths, places = [0] * alive.bit_length(), []
        held, num_found = alive, 0

        def leave(gone: int) -> None:
            while gone:
                bit = gone & -gone
                gone ^= bit
                place = bit.bit_length() - 1
                depths[place] = num_found
                places.append(place)

        for name in names:
            shard = self._shard_of(name)
            value = shard.get(name, 0)
            if not value:
                break
            shard[name] = value | _ASKED
            left = held & self._masks[value >> 1]
            if left != held and num_found:
                leave(held ^ left)
            held = left
            if not held:
                break
            num_found += 1
        if num_found:
            leave(held)
        return LeadingNames(depths, places, len(places))

    def deepest(self, found: LeadingNames, among: int, turn: float, most: int) -> list[int]:
        depths, places, end = found
        chosen: list[int] = []
        while end and len(chosen) < most:
            depth = depths[places[end - 1]]
            begin = bisect_left(places, depth, hi=end, key=depths.__getitem__)
            first = begin + int(turn * (end - begin))
            equal = (*places[first:end], *places[begin:first])
            chosen += [place for place in equal if among >> place & 1]
            end = begin
        return chosen[:most]

    def sets_of(self, names: Sequence[BlockHash]) -> list[Run]:
        runs: list[Run] = []
        for end, name in enumerate(names, 1):
            number = self._shard_of(name).get(name, 0) >> 1
            if runs and runs[-1][0] == number:
                runs[-1] = (number, end)
            else:
                runs.append((number, end))
        return runs

    def put(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        begin = num_evicted = 0
        self._num_spares = SPARED_AT_ONCE + len(names)
        for number, end in runs:
            for name in names[begin:end]:
                num_evicted += self._put(name, number)
            begin = end
        return num_evicted

    def _put(self, name: BlockHash, number: int) -> int:
        shard, num_evicted = self._shard_of(name), 0
        before = shard.get(name, 0)
        if before:
            self._count(before >> 1, -1)
        elif number:
            while self._num_names >= self.max_names:
                num_evicted += self._evict_from(self._shards[self._hand])
                self._hand = (self._hand + 1) % NUM_SHARDS
        if number:
            shard[name] = number << 1 | before & _ASKED
            self._count(number, 1)
        elif before:
            del shard[name]
        return num_evicted

    def _evict_from(self, shard: dict[BlockHash, int]) -> int:
        num_evicted, spares = 0, self._num_spares > 0
        num_looked_at = math.ceil(len(shard) * EVICTED_AT_ONCE) if spares else 1
        for name in list(islice(shard, num_looked_at)):
            value = shard.pop(name)
            is_dead = value >> 1 in self._dead
            if value & _ASKED and not is_dead and spares:
                shard[name] = value ^ _ASKED  # as the newest
                self._num_spares -= 1
            else:
                self._count(value >> 1, -1)
                num_evicted += not is_dead
        return num_evicted

    def counts(self, first: int, number: int) -> list[int]:
        return [self._counts.get(each, 0) for each in range(first, first + number)]

    def kill(self, number: int, is_dead: bool = True) -> None:
        if is_dead:
            self._dead.add(number)
        else:
            self._dead.discard(number)

    def purge(self, shard: int) -> None:
        held = self._shards[shard]
        num_before = len(held)
        for name in [name for name, value in held.items() if value >> 1 in self._dead]:
            self._count(held.pop(name) >> 1, -1)
        if len(held) < num_before // 2:
            self._shards[shard] = dict(held.items())  # a dict never becomes smaller

    def _shard_of(self, name: BlockHash) -> dict[BlockHash, int]:
        return self._shards[hash(name) >> 40 & 0xFF]

    def _count(self, number: int, change: int) -> None:
        self._num_names += change
        count = self._counts.get(number, 0) + change
        if count:
            self._counts[number] = count
        else:
            self._counts.pop(number, None)


class CompiledNames:
    """`BlockNames` in a compiled hash table: 16 bytes of a name, 4 of its set, 5 to find it.

    If the system refuses memory, names are evicted although there is room for more.

    Args:
        library: `kernels.cpu.library.BLOCK_NAMES`.

    Raises:
        MemoryError: there is none for an empty table.
    """

    ENTRY_NBYTES = 40  # 25.4 a place, of which at least 64 % are taken

    def __init__(self, max_nbytes: int, library: ctypes.CDLL) -> None:
        self.max_names = max(1, max_nbytes // self.ENTRY_NBYTES)
        table, names = (c_void_p,), (c_void_p, c_char_p, c_int64)
        mask, results = (c_char_p, c_uint64), (c_void_p, c_void_p)
        signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "num": (c_uint64, table),
            "nbytes": (c_uint64, table),
            "keep": (c_int, (*table, c_uint32, *mask)),
            "match": (c_int64, (*names, *mask, *results)),
            "deepest": (c_int64, (*results, c_int64, *mask, c_double, c_int64, c_void_p)),
            "runs": (c_int64, (*names, *results)),
            "put": (c_uint64, (*names, *results)),
            "counts": (None, (*table, c_uint32, c_uint32, c_void_p)),
            "kill": (None, (*table, c_uint32, c_int)),
            "purge": (None, (*table, c_uint32)),
            "new": (c_void_p, (c_uint64,)),
            "free": (None, table),
        }
        functions = SimpleNamespace()
        for name, (result, arguments) in signatures.items():
            function = library[f"disagg_block_names_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(functions, name, function)
        self._call = functions
        self._table = self._call.new(self.max_names)
        if not self._table:
            raise MemoryError("no memory for an empty prefix index")
        self._reserve(1024)
        self._depths: Any = (c_uint32 * 0)()  # results of `match`
        self._places: Any = (c_uint32 * 0)()

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            self._call.free(self._table)

    def _reserve(self, number: int) -> None:
        """Room for the results of a call about so many names."""
        self._room = number
        self._numbers, self._ends = (c_uint32 * number)(), (c_uint32 * number)()
        self._numbers_at = ctypes.addressof(self._numbers)
        self._ends_at = ctypes.addressof(self._ends)

    @property
    def num_names(self) -> int:
        number: int = self._call.num(self._table)
        return number

    @property
    def nbytes(self) -> int:
        number: int = self._call.nbytes(self._table)
        return number

    def keep(self, number: int, mask: int) -> None:
        its = _bytes_of(mask)
        if not self._call.keep(self._table, number, its, len(its)):
            raise MemoryError("no memory for one more set of workers in the prefix index")

    def match(self, names: Sequence[BlockHash], alive: int) -> LeadingNames:
        mask = _bytes_of(alive)
        num_places = 8 * len(mask)
        if num_places > len(self._depths):
            self._depths, self._places = (c_uint32 * num_places)(), (c_uint32 * num_places)()
        depths, places, joined = self._depths, self._places, _joined(names)
        ctypes.memset(depths, 0, ctypes.sizeof(depths))
        number = self._call.match(self._table, joined, len(names), mask, len(mask), depths, places)
        return LeadingNames(depths, places, number)

    def deepest(self, found: LeadingNames, among: int, turn: float, most: int) -> list[int]:
        chosen, mask = (c_uint32 * most)(), _bytes_of(among)
        number = self._call.deepest(*found, mask, len(mask), turn, most, chosen)
        return chosen[:number]

    def sets_of(self, names: Sequence[BlockHash]) -> list[Run]:
        if len(names) > self._room:
            self._reserve(len(names))
        joined = _joined(names)
        found = self._call.runs(self._table, joined, len(names), self._numbers_at, self._ends_at)
        numbers, ends = self._numbers, self._ends
        if found == 1:  # as in most events
            return [(numbers[0], ends[0])]
        return list(zip(numbers[:found], ends[:found], strict=True))

    def put(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        if len(runs) > self._room:
            self._reserve(len(runs))
        for place, (number, end) in enumerate(runs):
            self._numbers[place], self._ends[place] = number, end
        num_evicted: int = self._call.put(
            self._table, _joined(names), len(runs), self._numbers_at, self._ends_at
        )
        return num_evicted

    def counts(self, first: int, number: int) -> list[int]:
        if number > self._room:
            self._reserve(number)
        self._call.counts(self._table, first, number, self._numbers_at)
        return self._numbers[:number]

    def kill(self, number: int, is_dead: bool = True) -> None:
        self._call.kill(self._table, number, is_dead)

    def purge(self, shard: int) -> None:
        self._call.purge(self._table, shard)


def _joined(names: Sequence[BlockHash]) -> bytes:
    """Raises `ValueError` where the library would read beyond them."""
    joined = b"".join(names)
    if len(joined) != len(names) * HASH_NBYTES:
        raise ValueError(f"names of blocks have {HASH_NBYTES} bytes each")
    return joined


def _bytes_of(mask: int) -> bytes:
    return mask.to_bytes(-(-mask.bit_length() // 8), "little")
