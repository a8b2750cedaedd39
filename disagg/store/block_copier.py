"""Copies blocks between a worker's cache and its host tier while the engine computes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Protocol, TypeVar

from disagg.kvtransfer.slab import Slab, merge_runs

T = TypeVar("T")


class BlockCopier(Protocol):
    """Two queues of copies, one per direction, each processed in order. No method waits.

    It is used by one thread. Only the copier may write to the destination of a queued copy. The
    source may change during the copy; the caller must detect that and discard the copy.
    """

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (block, slot) to host memory, after work submitted to the device before."""
        ...

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (slot, block) to the cache, after work submitted to the device before."""
        ...

    def take_saved(self) -> int:
        """Number of calls of `save` whose copies have ended since the last call."""
        ...

    def take_loaded(self) -> list[float]:
        """Seconds of each call of `load` whose copies have ended since the last call.

        The time in the queue does not count.
        """
        ...

    def read_slot(self, slot: int) -> bytes:
        """The bytes of a block in host memory."""
        ...

    def close(self) -> None: ...


class ThreadCopier:
    """Copies between two slabs in host memory, in a separate thread.

    Loads go before saves: a request may wait for a load, but never for a save.
    """

    _CLOSE, _LOAD, _SAVE = range(3)  # by priority

    def __init__(self, cache: Slab, host: Slab, timer: Callable[[], float]) -> None:
        self._cache = cache
        self._host = host
        self._timer = timer
        self._inbox: PriorityQueue[tuple[int, int, tuple[tuple[int, int], ...]]] = PriorityQueue()
        self._numbers = count()  # keep the order of a kind
        self._saved: SimpleQueue[None] = SimpleQueue()
        self._loaded: SimpleQueue[float] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)
        self._thread.start()

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inbox.put((self._SAVE, next(self._numbers), tuple(pairs)))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inbox.put((self._LOAD, next(self._numbers), tuple(pairs)))

    def take_saved(self) -> int:
        return len(drained(self._saved))

    def take_loaded(self) -> list[float]:
        return drained(self._loaded)

    def read_slot(self, slot: int) -> bytes:
        return ctypes.string_at(self._host.address(slot), self._host.block_nbytes)

    def close(self) -> None:
        """End after the running copy. Queued copies are dropped."""
        self._inbox.put((self._CLOSE, 0, ()))
        self._thread.join()

    def _run(self) -> None:
        while True:
            kind, _, pairs = self._inbox.get()
            if kind == self._LOAD:
                began_s = self._timer()
                _copy(self._host, self._cache, pairs)
                self._loaded.put(self._timer() - began_s)
            elif kind == self._SAVE:
                _copy(self._cache, self._host, pairs)
                self._saved.put(None)
            else:
                return


def _copy(source: Slab, into: Slab, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks between slabs. ctypes releases the interpreter lock meanwhile."""
    for first, into_first, num_blocks in merge_runs(pairs):
        nbytes = num_blocks * source.block_nbytes
        ctypes.memmove(into.address(into_first), source.address(first), nbytes)


def drained(queue: SimpleQueue[T]) -> list[T]:
    """What is in a queue now. Never waits."""
    items: list[T] = []
    while True:
        try:
            items.append(queue.get_nowait())
        except Empty:
            return items
