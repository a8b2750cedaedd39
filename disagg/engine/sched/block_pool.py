"""The owner of all block state: reference counts, block hashes and the free list.

A block is *held* (reference count above 0), *idle* (not held, but cached under its hash) or *free*.
This module decides which block to allocate and which idle block to evict. It must not know
sequences, steps, tensors or workers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Literal

from disagg.blocks import BlockHash
from disagg.engine.sched.free_runs import FreeRuns
from disagg.kv_groups import KVGroups, Window
from disagg.messages import KVEvent

EXTENT_TOKENS = 256  # idle blocks within an aligned range of so many slots are evicted together


def require(holds: bool, difference: str) -> None:
    """Raise AssertionError(difference) unless the invariant holds, also under `python -O`."""
    if not holds:
        raise AssertionError(difference)


class BlockPool:
    """The state of all blocks. Each operation takes amortised O(1) time per block that it names.

    Args:
        num_blocks: blocks of the slab.
        block_size: token positions in one block.
        generations: one counter per block, shared with the transport's stamp table. It is
            incremented before a block may be written for another use, so that a remote reader can
            tell that its copy is not what its ticket promised.
        enable_prefix_caching: whether full blocks of sequences are cached and found by their
            hashes.
        windows: of the model's groups of layers, whose blocks are all of this pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        generations: MutableSequence[int],
        *,
        enable_prefix_caching: bool = True,
        windows: tuple[Window, ...] = (None,),
    ) -> None:
        if len(generations) != num_blocks:
            raise ValueError(f"got {len(generations)} generations for {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = KVGroups(windows, block_size)
        self.generations = generations
        self.enable_prefix_caching = enable_prefix_caching
        self._num_holders = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self._free = FreeRuns(num_blocks)
        self._extent = max(1, EXTENT_TOKENS // block_size)  # blocks
        self._events: list[tuple[Literal["stored", "removed"], list[BlockHash]]] = []
        self._evicted: list[tuple[int, BlockHash]] = []
        self._passing: set[BlockHash] = set()  # names of which nobody is told

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now: free or idle."""
        return self._free.num_free + len(self._idle)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The leading run of blocks that are cached under `hashes`. Changes nothing.

        The result holds until the next `allocate`; `acquire` it to keep it.
        """
        block_of = self._block_of
        found: list[int] = []
        for block_hash in hashes:
            block_id = block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def __contains__(self, name: BlockHash) -> bool:
        """Whether a block is cached under this name."""
        return name in self._block_of

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block; idle blocks become held with their content.

        Raises:
            ValueError: a block is free, so it has no content to acquire.
        """
        holders, hash_of, idle = self._num_holders, self._hash_of, self._idle
        for block_id in block_ids:
            if holders[block_id] == 0:
                if hash_of[block_id] is None:
                    raise ValueError(f"block {block_id} is free and cannot be acquired")
                del idle[block_id]
            holders[block_id] += 1

    def allocate(self, num_blocks: int, *, apart: bool = False) -> list[int] | None:
        """Take `num_blocks` blocks for new content, each with one holder; None if there are too
        few.

        Prefers neighbouring blocks, and free blocks to idle ones. Of the idle blocks the least
        recently used are evicted first, and the end of a prefix before its beginning.

        Args:
            apart: each block is for a different owner, so short runs are used up first.
        """
        if num_blocks > self.num_free:
            return None
        while (num_missing := num_blocks - self._free.num_free) > 0:
            self._evict_oldest(1 if apart else num_missing)
        block_ids = self._free.take(num_blocks, apart=apart)
        for block_id in block_ids:
            self.generations[block_id] += 1
            self._num_holders[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int], *, is_spent: bool = False) -> None:
        """Remove one holder from each block. A cached block without holders becomes idle.

        Args:
            is_spent: blocks that become idle are evicted first instead of last.

        Raises:
            ValueError: a block has no holder.
        """
        holders, hash_of = self._num_holders, self._hash_of
        for block_id in block_ids if is_spent else reversed(block_ids):
            if holders[block_id] == 0:
                raise ValueError(f"block {block_id} was released without a holder")
            holders[block_id] -= 1
            if holders[block_id] == 0:
                if hash_of[block_id] is None:
                    self._free.add(block_id)
                else:
                    self._idle[block_id] = None
                    if is_spent:
                        self._idle.move_to_end(block_id, last=False)

    def publish(self, block_id: int, block_hash: BlockHash, *, is_passing: bool = False) -> None:
        """Cache a held, full block under its hash. If the hash is taken, the first block keeps it.

        Args:
            is_passing: the owner will soon `drop_passing` or `keep_passing`; until then sequences
                find the block, but no KV event tells of it.

        Raises:
            ValueError: the block has no holder, or another hash.
        """
        if self._num_holders[block_id] == 0:
            raise ValueError(f"block {block_id} was published without a holder")
        name = self._hash_of[block_id]
        if name == block_hash or (name is None and block_hash in self._block_of):
            if not is_passing:
                self.keep_passing((block_hash,))
            return
        if name is not None:
            raise ValueError(f"block {block_id} was published under a second name")
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        if is_passing:
            self._passing.add(block_hash)
        else:
            self._record("stored", block_hash)

    def keep_passing(self, names: Iterable[BlockHash]) -> None:
        """Tell of blocks that were published as passing, as far as they are still cached."""
        for name in names:
            if name in self._passing:
                self._passing.remove(name)
                self._record("stored", name)

    def drop_passing(self, names: Iterable[BlockHash]) -> None:
        """Forget blocks that were published as passing, if nobody was told of them."""
        self.forget([name for name in names if name in self._passing])

    def forget(self, names: Iterable[BlockHash]) -> None:
        """Forget these names, so that no other sequence finds the content of their blocks."""
        for name in names:
            block_id = self._block_of.pop(name, None)
            if block_id is None:
                continue
            self._hash_of[block_id] = None
            self._record("removed", name)
            if self._num_holders[block_id] == 0:
                del self._idle[block_id]
                self._free.add(block_id)

    def take_events(self) -> tuple[KVEvent, ...]:
        """KV events since the last call, in order: blocks cached and evicted."""
        events = tuple(KVEvent(kind, tuple(hashes)) for kind, hashes in self._events)
        self._events.clear()
        return events

    def take_evicted(self) -> list[tuple[int, BlockHash]]:
        """Cached blocks that were evicted since the last call.

        Their bytes are intact until the next step writes them: save them before that.
        """
        evicted = self._evicted
        if evicted:
            self._evicted = []
        return evicted

    def hashes(self) -> tuple[BlockHash, ...]:
        """What KV events have told of all cached blocks."""
        told = (name for name in self._block_of if name not in self._passing)
        return tuple(each for each in map(self.groups.reported, told) if each is not None)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Recount everything from `holders`, one list of blocks for each holder.

        Raises:
            AssertionError: a count differs; the message says which.
        """
        counted = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                counted[block_id] += 1
        free = {i for start, end in self._free.runs() for i in range(start, end)}
        require(len(free) == self._free.num_free, "the free blocks are miscounted")
        for block_id, num_holders in enumerate(self._num_holders):
            # Sentences are made only for what is wrong: this runs after every step of a test.
            if num_holders != counted[block_id]:
                raise AssertionError(
                    f"block {block_id} has the count {num_holders}, but {counted[block_id]} holders"
                )
            is_idle, is_free, name = (
                block_id in self._idle,
                block_id in free,
                self._hash_of[block_id],
            )
            if (num_holders > 0) + is_idle + is_free != 1:
                states = (num_holders > 0, is_idle, is_free)
                raise AssertionError(f"block {block_id}: held, idle, free = {states}")
            if is_free and name is not None:
                raise AssertionError(f"free block {block_id} has a name")
            if is_idle and name is None:
                raise AssertionError(f"idle block {block_id} has no name")
            if name is not None and self._block_of.get(name) != block_id:
                raise AssertionError(f"block {block_id} is not found under its name")
        require(self._passing <= self._block_of.keys(), "a passing name without a block")
        num_named = sum(name is not None for name in self._hash_of)
        require(num_named == len(self._block_of), "names without a block")

    def _evict_oldest(self, num_missing: int) -> None:
        """Evict the oldest idle block; if many are needed, all idle blocks of its extent.

        If age alone decided, blocks would be evicted one by one in an order unrelated to their
        addresses, and every prompt would soon be scattered all over the slab.
        """
        oldest = next(iter(self._idle))
        if num_missing < self._extent:
            self._evict(oldest)
            return
        start = oldest - oldest % self._extent
        for block_id in range(start, start + self._extent):
            if block_id in self._idle:
                self._evict(block_id)

    def _evict(self, block_id: int) -> None:
        del self._idle[block_id]
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        self._hash_of[block_id] = None
        del self._block_of[block_hash]
        self._free.add(block_id)
        if block_hash not in self._passing:
            self._evicted.append((block_id, block_hash))
        self._record("removed", block_hash)

    def _record(self, kind: Literal["stored", "removed"], block_hash: BlockHash) -> None:
        """Add a KV event for a block's name, which is passing no longer."""
        if block_hash in self._passing:
            self._passing.remove(block_hash)
            return
        reported = self.groups.reported(block_hash)
        if reported is None:
            return
        if self._events and self._events[-1][0] == kind:
            self._events[-1][1].append(reported)
        else:
            self._events.append((kind, [reported]))
