"""The names of cached KV blocks, each with the number of a set of workers, in little memory.

`CompiledNames` (`csrc/block_names.cpp`) takes 25 to 40 bytes a name. `DictNames` is for
installations without a compiler; it takes 110 to 180. What the sets are only `prefix_index` knows;
set 0 is empty.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from itertools import islice
from typing import Any, Protocol, TypeAlias

from disagg.blocks import HASH_NBYTES, BlockHash
from disagg.kernels.cpu_library import BLOCK_NAMES, find_library

NUM_SHARDS = 256  # so that growing and purging touch few names at a time
EVICTED_AT_ONCE = 1 / 64  # of a shard
_ASKED = 1  # the lowest bit of a value: it was looked up since it was last spared
# A name with its header, as the allocator rounds it up, and the number of its set.
_NAME_NBYTES = 64


# The number of a set of workers, which is the same for several names in a row, and where in the
# sequence of names they end.
Run: TypeAlias = tuple[int, int]


class BlockNames(Protocol):
    """What the prefix index needs. Names that have not `HASH_NBYTES` bytes are never here."""

    entry_nbytes: int  # of one name, at most

    @property
    def num_names(self) -> int:
        """Without those of dead sets."""

    @property
    def nbytes(self) -> int: ...

    def leading(self, names: Sequence[BlockHash]) -> tuple[list[int], list[int]]:
        """The sets of the leading names that are here, as runs: sets and ends.

        These names count as looked up.
        """

    def sets_of(self, names: Sequence[BlockHash]) -> list[Run]:
        """The sets of all names."""

    def put(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        """Give names their sets; 0 removes them. Returns `num_names`."""

    def make_room(self, max_names: int) -> int:
        """Evict the oldest names until there are at most so many; those that were looked up get a
        second chance (CLOCK, an approximation of LRU; Corbató, 1968). Returns how many it evicted.
        """

    def counts(self, first: int, number: int) -> list[int]:
        """How many names each of `number` sets has, from the set `first` on."""

    def kill(self, number: int, is_dead: bool = True) -> None:
        """Names of this set no longer count and may be purged; or they count again."""

    def purge(self, shard: int) -> None:
        """Remove the names of dead sets from one of `NUM_SHARDS` shards."""


def new_block_names() -> BlockNames:
    """The compiled ones where the installation has them."""
    library = find_library(BLOCK_NAMES).loaded
    return DictNames() if library is None else CompiledNames(library)


class DictNames:
    """`BlockNames` as dicts."""

    entry_nbytes = _NAME_NBYTES + 6 * 20  # a dict that has just grown has six places per name

    def __init__(self) -> None:
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._counts: dict[int, int] = {}
        self._dead: set[int] = set()
        self._hand = 0  # the shard in which room is made next
        self._num_names = 0

    @property
    def num_names(self) -> int:
        return self._num_names - sum(self._counts.get(number, 0) for number in self._dead)

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self._shards)) + _NAME_NBYTES * self._num_names

    def leading(self, names: Sequence[BlockHash]) -> tuple[list[int], list[int]]:
        shards = self._shards
        found: list[int] = []
        for name in names:
            shard = shards[hash(name) >> 40 & 0xFF]
            value = shard.get(name, 0)
            if not value:
                break
            if not value & _ASKED:
                shard[name] = value | _ASKED
            found.append(value >> 1)
        return found, list(range(1, len(found) + 1))

    def sets_of(self, names: Sequence[BlockHash]) -> list[Run]:
        shards = self._shards
        return _runs([shards[hash(name) >> 40 & 0xFF].get(name, 0) >> 1 for name in names])

    def put(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        begin = 0
        for number, end in runs:
            for name in names[begin:end]:
                shard = self._shards[hash(name) >> 40 & 0xFF]
                before = shard.get(name, 0)
                if before:
                    self._count(before >> 1, -1)
                if number and len(name) == HASH_NBYTES:
                    shard[name] = number << 1 | before & _ASKED
                    self._count(number, 1)
                elif before:
                    del shard[name]
            begin = end
        return self.num_names

    def make_room(self, max_names: int) -> int:
        before = self._num_names
        while self._num_names > max_names:
            shard = self._shards[self._hand]
            self._hand = (self._hand + 1) % NUM_SHARDS
            for name in list(islice(shard, math.ceil(len(shard) * EVICTED_AT_ONCE))):
                value = shard.pop(name)
                if value & _ASKED:
                    shard[name] = value ^ _ASKED  # as the newest
                else:
                    self._count(value >> 1, -1)
        return before - self._num_names

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

    def _count(self, number: int, change: int) -> None:
        self._num_names += change
        count = self._counts.get(number, 0) + change
        if count:
            self._counts[number] = count
        else:
            self._counts.pop(number, None)


class CompiledNames:
    """`BlockNames` in a compiled hash table: 16 bytes of a name, 4 of its set, 5 to find it.

    Args:
        library: `cpu_library.BLOCK_NAMES`.
    """

    entry_nbytes = 40  # 25.4 a place, of which at least 64 % are taken

    def __init__(self, library: ctypes.CDLL) -> None:
        signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "num": (c_uint64, ()),
            "nbytes": (c_uint64, ()),
            "runs": (c_int64, (c_char_p, c_int64, c_int, c_void_p, c_void_p)),
            "put": (c_uint64, (c_char_p, c_int64, c_void_p, c_void_p)),
            "make_room": (c_uint64, (c_uint64,)),
            "counts": (None, (c_uint32, c_uint32, c_void_p)),
            "kill": (None, (c_uint32, c_int)),
            "purge": (None, (c_uint32,)),
        }
        functions = {}
        for name, (result, arguments) in signatures.items():
            function = functions[name] = library[f"disagg_block_names_{name}"]
            function.restype, function.argtypes = result, (c_void_p, *arguments)
        self._call = functions
        new, self._free = library.disagg_block_names_new, library.disagg_block_names_free
        new.restype, new.argtypes = c_void_p, ()
        self._free.restype, self._free.argtypes = None, (c_void_p,)
        self._table = new()
        if not self._table:
            raise MemoryError("no memory for an empty prefix index")
        self._runs, self._put = functions["runs"], functions["put"]
        self._reserve(1024)

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            self._free(self._table)

    def _reserve(self, number: int) -> None:
        """Room for the results of a call about so many names."""
        self._room = number
        self._numbers, self._ends = (c_uint32 * number)(), (c_uint32 * number)()
        self._numbers_at = ctypes.addressof(self._numbers)
        self._ends_at = ctypes.addressof(self._ends)

    @property
    def num_names(self) -> int:
        number: int = self._call["num"](self._table)
        return number

    @property
    def nbytes(self) -> int:
        number: int = self._call["nbytes"](self._table)
        return number

    def leading(self, names: Sequence[BlockHash]) -> tuple[list[int], list[int]]:
        joined, number = b"".join(names), len(names)
        if len(joined) != number * HASH_NBYTES:
            number = next(i for i, name in enumerate(names) if len(name) != HASH_NBYTES)
            return self.leading(names[:number])
        found = self._runs_of(joined, number, asks=True)
        return self._numbers[:found], self._ends[:found]

    def sets_of(self, names: Sequence[BlockHash]) -> list[Run]:
        joined = b"".join(names)
        if len(joined) != len(names) * HASH_NBYTES:
            joined = b"".join(map(_of_right_size, names))
        found = self._runs_of(joined, len(names), asks=False)
        numbers, ends = self._numbers, self._ends
        if found == 1:  # as in most events
            return [(numbers[0], ends[0])]
        return list(zip(numbers[:found], ends[:found], strict=True))

    def put(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        joined = b"".join(names)
        if len(joined) != len(names) * HASH_NBYTES:
            return self._put_good(names, runs)
        if len(names) > self._room:
            self._reserve(len(names))
        for place, (number, end) in enumerate(runs):
            self._numbers[place], self._ends[place] = number, end
        count: int = self._put(self._table, joined, len(runs), self._numbers_at, self._ends_at)
        return count

    def _runs_of(self, joined: bytes, number: int, asks: bool) -> int:
        """How many runs there are, in `_numbers` and `_ends`."""
        if number > self._room:
            self._reserve(number)
        found: int = self._runs(self._table, joined, number, asks, self._numbers_at, self._ends_at)
        return found

    def _put_good(self, names: Sequence[BlockHash], runs: Sequence[Run]) -> int:
        """`put` where some names have a wrong length."""
        begin = 0
        for number, end in runs:
            good = [name for name in names[begin:end] if len(name) == HASH_NBYTES]
            self.put(good, [(number, len(good))])
            begin = end
        return self.num_names

    def make_room(self, max_names: int) -> int:
        number: int = self._call["make_room"](self._table, max_names)
        return number

    def counts(self, first: int, number: int) -> list[int]:
        if number > self._room:
            self._reserve(number)
        self._call["counts"](self._table, first, number, self._numbers_at)
        return self._numbers[:number]

    def kill(self, number: int, is_dead: bool = True) -> None:
        self._call["kill"](self._table, number, is_dead)

    def purge(self, shard: int) -> None:
        self._call["purge"](self._table, shard)


def _runs(numbers: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    for end, number in enumerate(numbers, 1):
        if runs and runs[-1][0] == number:
            runs[-1] = (number, end)
        else:
            runs.append((number, end))
    return runs


def _of_right_size(name: BlockHash) -> BlockHash:
    """A name of a wrong length is not here, and nor is the one that nobody has."""
    return name if len(name) == HASH_NBYTES else _NOBODYS


_NOBODYS = b"\xff" * HASH_NBYTES
