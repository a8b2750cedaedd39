"""A rank's part of the KV that its worker keeps in host memory and in the store.

It is used by the thread that computes steps, so that copies and steps are in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.rank_messages import (
    FromRank,
    RankCopied,
    RankCopies,
    RankFetch,
    RankFetched,
    RankOffload,
    RankPut,
    RankStored,
)
from disagg.store.block_copier import BlockCopier
from disagg.store.store_thread import Block, FetchDone, FetchJob, PutJob, StoreThread


class Offload:
    """Copies this rank's part of blocks to host memory and to the store.

    Args:
        copier: copies to host memory; None if there is no host tier.
        store: None if there is no store.
        read_blocks, write_block: see `Parts`.
        tell: sends a message to the first rank.
    """

    def __init__(
        self,
        copier: BlockCopier | None,
        store: StoreThread | None,
        read_blocks: Callable[[Sequence[int]], Sequence[Block]],
        write_block: Callable[[int, bytes], None],
        tell: Callable[[FromRank], None],
    ) -> None:
        self._copier, self._store = copier, store
        self._read_blocks, self._write_block = read_blocks, write_block
        self._tell = tell
        self._num_copies = self._num_puts = 0  # running ones
        self._fetches: dict[int, RankFetch] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a task is running, whose end `report` will report."""
        return bool(self._num_copies or self._num_puts or self._fetches)

    def begin(self, task: RankOffload) -> None:
        match task:
            case RankCopies():
                self._copy(task)
            case RankPut():
                self._put(task)
            case RankFetch():
                self._fetch(task)

    def report(self) -> None:
        """Tell the first rank which tasks have ended."""
        if self._num_copies and self._copier is not None:
            num_saved, loaded_s = self._copier.take_saved(), self._copier.take_loaded()
            if num_saved or loaded_s:
                self._num_copies -= num_saved + len(loaded_s)
                self._tell(RankCopied(num_saved, loaded_s))
        for done in self._store.take_done() if self._store is not None else ():
            if isinstance(done, FetchDone):
                self._tell(self._fetched(done))
            else:
                self._num_puts -= len(done.block_hashes)
                self._tell(RankStored([done.error] * len(done.block_hashes)))

    def _copy(self, copies: RankCopies) -> None:
        assert self._copier is not None, "all ranks have host memory, or none has"
        (self._copier.load if copies.is_load else self._copier.save)(copies.pairs)
        self._num_copies += 1

    def _put(self, put: RankPut) -> None:
        assert self._store is not None, "all ranks have the store, or none has"
        numbers = [number for number, _ in put.blocks]
        blocks = self._read_slots(numbers) if put.in_host else self._read_blocks(numbers)
        self._num_puts += len(blocks)
        self._store.put(
            [
                PutJob(name, block, number, put.in_host)
                for (number, name), block in zip(put.blocks, blocks, strict=True)
            ]
        )

    def _read_slots(self, slots: Sequence[int]) -> list[bytes]:
        assert self._copier is not None, "all ranks have host memory, or none has"
        return [self._copier.read_slot(slot) for slot in slots]

    def _fetch(self, fetch: RankFetch) -> None:
        assert self._store is not None, "all ranks have the store, or none has"
        self._fetches[fetch.number] = fetch
        num_blocks = len(fetch.names)
        names = tuple(fetch.names)
        self._store.fetch(FetchJob(fetch.number, names, lambda num_found: num_found == num_blocks))

    def _fetched(self, done: FetchDone) -> RankFetched:
        """Write fetched blocks to the cache, if they are complete."""
        assert self._store is not None, "all ranks have the store, or none has"
        fetch, error = self._fetches.pop(done.fetch_id), done.error
        if error is None and len(done.blocks) < len(fetch.names):
            error = f"the store has only {done.num_found} of {len(fetch.names)} blocks left"
        if error is None:
            for block_id, block in zip(fetch.into, done.blocks, strict=True):
                self._write_block(block_id, block)
        return RankFetched(done.fetch_id, error, self._store.num_damaged)
