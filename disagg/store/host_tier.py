"""The host tier: host memory behind a worker's cache, with copies of full blocks by hash.

Blocks are copied when they fill instead of when they are evicted, because at eviction a prompt
waits for the space and would have to wait for the copy. A copy never delays the reuse of a block:
it is valid only if the block's generation is unchanged after the copy, like a block that another
worker pulls (`kvtransfer.slab.Stamps`).

The number of slots limits its size. The least recently used block is evicted first, and may then be
stored in the cold tier. It is used by the engine's thread only, and no method waits. A
`BlockCopier` moves the bytes.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from disagg.blocks import BlockHash
from disagg.kv_groups import KVGroups, WantedPrefix
from disagg.messages import HostCounts, KVEvent
from disagg.store.block_copier import BlockCopier
from disagg.time_model import TransferTimeModel

HOST_ID = "host"  # its source id in a `TransferTimeModel`

# Assumed before the first load. A tier that seems too slow would never be used and measured.
FIRST_LATENCY_S = 1e-4
FIRST_BYTES_PER_S = 1e10

_WITHOUT_STATES = KVGroups((None,), 1)

# Takes evicted slots with their hashes, and a function that reads slots (`ColdTier.offer`).
Displace = Callable[[list[tuple[int, BlockHash]], Callable[[list[int]], list[bytes]]], object]


@dataclass(slots=True, eq=False)
class HostLoad:
    """Blocks that are being copied into the cache. `HostTier.poll` sets `done`."""

    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    done: bool = False


@dataclass(slots=True, eq=False)
class HostSource:
    """Blocks in host memory as a `KVSource` of KV import; they may be evicted at any time.

    is_whole: whether all of the blocks are needed, as with windows, or the leading ones are of use.
    """

    tier: HostTier
    names: Sequence[BlockHash]
    may_take_s: float
    is_whole: bool = False
    num_tokens: int = 0
    answer_s: float = math.inf

    def find(self, first_block: int) -> int:
        missing = self.names[first_block:]
        num_found = self.tier.match(missing)
        return 0 if self.is_whole and num_found < len(missing) else num_found

    def patience_s(self, num_blocks: int) -> float:
        return self.may_take_s

    def begin(self, first_block: int, into: list[int]) -> HostLoad:
        return self.tier.load(self.names[first_block : first_block + len(into)], into)

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Save:
    block_hash: BlockHash
    slot: int
    block_id: int
    generation: int  # the block's generation while its content matched its hash


class HostTier:
    """Copies of blocks in host memory, by block hash. Implements `KVTier` of KV import.

    Args:
        copier: owned by the tier from now on; `close` closes it.
        num_slots: its capacity in blocks.
        generations: generations of the cache's blocks, which `BlockPool` updates.
        displaced: called with evicted blocks before their slots are reused; it must read them at
            once or not at all.
        reported: what KV events say of a block (`KVGroups.reported`).
    """

    def __init__(
        self,
        copier: BlockCopier,
        num_slots: int,
        block_nbytes: int,
        generations: Sequence[int],
        displaced: Displace | None = None,
        reported: Callable[[BlockHash], BlockHash | None] = _WITHOUT_STATES.reported,
    ) -> None:
        self._reported = reported
        self._copier = copier
        self._num_slots = num_slots
        self._block_nbytes = block_nbytes
        self._generations = generations
        self._displaced = displaced
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()  # in order of eviction
        self._free = list(range(num_slots))[::-1]  # adjacent slots are taken one after another
        self._num_readers: Counter[int] = Counter()  # by slot
        self._coming: set[BlockHash] = set()
        self._saves: deque[list[_Save]] = deque()
        self._loads: deque[HostLoad] = deque()
        self._times = TransferTimeModel(FIRST_LATENCY_S, FIRST_BYTES_PER_S)
        self._events: list[tuple[Literal["stored", "removed"], list[BlockHash]]] = []
        self._counts = HostCounts()

    @property
    def num_under_way(self) -> int:
        """Number of copies that `poll` has not reported. While there are any, poll often."""
        return len(self._saves) + len(self._loads)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slot_of

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks of `hashes` that are in host memory."""
        slot_of = self._slot_of
        return next((i for i, name in enumerate(hashes) if name not in slot_of), len(hashes))

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Mark a prefix as recently used; its beginning is evicted last."""
        for block_hash in reversed(hashes):
            if block_hash in self._slot_of:
                self._slot_of.move_to_end(block_hash)

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks whose content may be wrong, except those that are being loaded."""
        for block_hash in hashes:
            slot = self._slot_of.get(block_hash)
            if slot is not None and not self._num_readers[slot]:
                del self._slot_of[block_hash]
                self._free.append(slot)
                self._record("removed", block_hash)

    def save(self, blocks: Sequence[tuple[int, BlockHash]]) -> None:
        """Start to copy cached blocks, given with their hashes, to host memory."""
        saves: list[_Save] = []
        for block_id, block_hash in blocks:
            if block_hash in self._slot_of or block_hash in self._coming:
                continue
            slot = self._take_slot()
            if slot is None:
                self._counts.num_dropped += 1
                continue
            self._coming.add(block_hash)
            saves.append(_Save(block_hash, slot, block_id, self._generations[block_id]))
        if saves:
            self._saves.append(saves)
            self._copier.save([(save.block_id, save.slot) for save in saves])

    def predicted_s(self, num_blocks: int) -> float:
        """Predicted seconds to load `num_blocks` blocks, from recent loads or the prior."""
        return self._times.transfer_s(HOST_ID, num_blocks * self._block_nbytes)

    def ask(self, wanted: WantedPrefix) -> HostSource | None:
        self.touch(wanted.names(len(wanted.hashes)))
        is_here = wanted.is_here
        num_rows = wanted.groups.num_found(
            wanted.hashes, lambda name: name in self._slot_of or is_here(name)
        )
        if num_rows <= wanted.num_here:
            return None
        names, may_take_s = wanted.names(num_rows), wanted.compute_s(num_rows - wanted.num_here)
        if self.predicted_s(sum(not is_here(name) for name in names)) >= may_take_s:
            return None
        return HostSource(self, names, may_take_s, is_whole=wanted.groups.num_partial > 0)

    def load(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> HostLoad:
        """Start to copy blocks from here to cache blocks that nothing else reads or writes."""
        slots = tuple(self._slot_of[block_hash] for block_hash in hashes)
        self.touch(hashes)
        self._num_readers.update(slots)
        load = HostLoad(tuple(hashes), slots)
        self._loads.append(load)
        self._copier.load(list(zip(slots, block_ids, strict=True)))
        return load

    def poll(self) -> list[tuple[HostLoad, None]]:
        """Process the copies that have ended. Returns the loads among them; none fails."""
        if not self.num_under_way:
            return []
        for _ in range(self._copier.take_saved()):
            for save in reversed(self._saves.popleft()):  # the first block is then evicted last
                self._finish(save)
        loaded: list[tuple[HostLoad, None]] = []
        for seconds in self._copier.take_loaded():
            load = self._loads.popleft()
            loaded.append((load, None))
            load.done = True
            self._num_readers -= Counter(load.slots)
            self._counts.num_loaded += len(load.slots)
            self._counts.load_s += seconds
            self._times.observe(HOST_ID, len(load.slots) * self._block_nbytes, seconds)
        return loaded

    def hashes(self) -> tuple[BlockHash, ...]:
        """What KV events have told of all blocks here."""
        return tuple(each for each in map(self._reported, self._slot_of) if each is not None)

    def take_events(self) -> tuple[KVEvent, ...]:
        """KV events since the last call, in order: blocks cached and evicted."""
        events = tuple(KVEvent(kind, tuple(hashes), "host") for kind, hashes in self._events)
        self._events.clear()
        return events

    def counts(self) -> HostCounts:
        """The counters for `WorkerStatus`."""
        nbytes, latency_s = len(self._slot_of) * self._block_nbytes, self.predicted_s(0)
        block_s = self.predicted_s(1) - latency_s
        return replace(self._counts, nbytes=nbytes, latency_s=latency_s, block_s=block_s)

    def check(self) -> None:
        """Recount the slots. Raises `AssertionError`."""
        slots = [*self._slot_of.values(), *self._free]
        slots += [save.slot for saves in self._saves for save in saves]
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost, or used twice"
        readers = Counter(slot for load in self._loads for slot in load.slots)
        assert self._num_readers == readers, "a slot has a reader that is gone"
        assert set(readers) <= set(self._slot_of.values()), "a slot was taken from its reader"

    def close(self) -> None:
        self._copier.close()

    def _finish(self, save: _Save) -> None:
        self._coming.remove(save.block_hash)
        if self._generations[save.block_id] != save.generation:
            # The block was evicted meanwhile and may have been overwritten.
            self._counts.num_torn += 1
            self._free.append(save.slot)
            return
        self._counts.num_saved += 1
        self._slot_of[save.block_hash] = save.slot
        self._record("stored", save.block_hash)

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        readers, oldest_first = self._num_readers, self._slot_of.items()
        block_hash, slot = next((each for each in oldest_first if not readers[each[1]]), (b"", -1))
        if slot < 0:
            return None
        del self._slot_of[block_hash]
        self._record("removed", block_hash)
        if self._displaced is not None:
            self._displaced([(slot, block_hash)], self._read)
        return slot

    def _read(self, slots: list[int]) -> list[bytes]:
        return [self._copier.read_slot(slot) for slot in slots]

    def _record(self, kind: Literal["stored", "removed"], block_hash: BlockHash) -> None:
        reported = self._reported(block_hash)
        if reported is None:
            return
        if self._events and self._events[-1][0] == kind:
            self._events[-1][1].append(reported)
        else:
            self._events.append((kind, [reported]))
