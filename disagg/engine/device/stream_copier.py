"""Copies blocks between a GPU's cache and pinned host memory, concurrently with the kernels.

Each direction has its own CUDA stream, since PCIe is full duplex. On the device a copy waits for
the work that was launched before it; the host never waits, but polls which copies have ended.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from disagg.errors import StartupError
from disagg.kvtransfer.slab import allocate_host, merge_runs


class _HostRows:
    """Pinned rows of host memory, one for each block.

    They are allocated here and registered with CUDA, because torch rounds its own pinned memory up
    to a power of two, so that 40 GiB would take 64.

    Raises:
        StartupError: there is not enough memory, or the limit of pinned memory is too low.
    """

    def __init__(self, cache: Tensor, num_slots: int) -> None:
        nbytes = num_slots * cache[0].numel() * cache.itemsize
        memory = torch.frombuffer(allocate_host(nbytes), dtype=torch.uint8)
        self.rows = memory.view(cache.dtype).view(num_slots, *cache.shape[1:])
        try:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
            reason = f"CUDA error {error}" if error else ""
        except (AssertionError, RuntimeError) as no_cuda:
            reason = str(no_cuda)
        if reason:
            raise StartupError(
                f"{nbytes} bytes of host memory cannot be pinned for evicted KV blocks ({reason});"
                " lower kv_offloading_size, or raise the limit of locked memory (ulimit -l).",
                param="kv_offloading_size",
            )
        # Freed memory must not stay registered, even if nobody calls this. No copy may be running.
        self.close = weakref.finalize(self, cudart.cudaHostUnregister, memory.data_ptr())
        self.close.atexit = False  # at exit CUDA is gone, and the process frees the memory

    def read(self, slot: int) -> bytes:
        row = self.rows[slot]
        return ctypes.string_at(row.data_ptr(), row.numel() * row.itemsize)


def _copy_rows(source: Tensor, into: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy rows (source, target) on the current stream."""
    for first, into_first, num_rows in merge_runs(pairs):
        rows = source[first : first + num_rows]
        into[into_first : into_first + num_rows].copy_(rows, non_blocking=True)


class StreamCopier:
    """A `store.block_copier.BlockCopier` on CUDA streams; belongs to the engine's thread.

    Args:
        cache: the GPU's cache with one row per block.
        num_slots: number of rows of host memory.

    Raises:
        StartupError: the memory cannot be pinned.
    """

    def __init__(self, cache: Tensor, num_slots: int) -> None:
        self._cache = cache
        self._host = _HostRows(cache, num_slots)
        self._saves, self._loads = _CopyDirection(cache.device), _CopyDirection(cache.device)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._saves.copy(self._cache, self._host.rows, pairs)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._loads.copy(self._host.rows, self._cache, pairs)

    def take_saved(self) -> int:
        return len(self._saves.take_ended())

    def take_loaded(self) -> list[float]:
        return self._loads.take_ended()

    def read_slot(self, slot: int) -> bytes:
        return self._host.read(slot)

    def close(self) -> None:
        torch.cuda.synchronize(self._cache.device)  # nothing may write to freed memory
        self._host.close()


class BlockReader:
    """Reads blocks of a GPU's cache that are about to be overwritten. The engine never waits.

    No earlier launch writes to these blocks, because a block is evicted only after the steps that
    wrote to it have ended. So a copy starts at once, concurrently with the running step. On the
    device later launches wait for the copy. The thread that takes the bytes, not the engine's,
    waits for it too.

    Args:
        cache: the GPU's cache with one row per block.
        num_slots: how many blocks may wait to be taken.
    """

    def __init__(self, cache: Tensor, num_slots: int) -> None:
        self._cache = cache
        self._host = _HostRows(cache, num_slots)
        self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(num_slots):
            self._free.put(slot)

    def __call__(self, block_ids: Sequence[int]) -> list[Callable[[], bytes]]:
        """Start copying blocks. Returns for each block a function that waits for its bytes.

        Each function must be called once.
        """
        pairs = [(block_id, self._free.get()) for block_id in block_ids]
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            _copy_rows(self._cache, self._host.rows, pairs)
            ended.record()
        torch.cuda.current_stream(self._cache.device).wait_event(ended)
        return [partial(self._take, ended, slot) for _, slot in pairs]

    def wait(self) -> None:
        """Wait until all blocks are copied. A writer outside the device's queue calls it first."""
        self._stream.synchronize()

    def _take(self, ended: torch.cuda.Event, slot: int) -> bytes:
        ended.synchronize()
        try:
            return self._host.read(slot)
        finally:
            self._free.put(slot)


class _CopyDirection:
    """Copies in one direction, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def copy(self, source: Tensor, into: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            began.record()
            _copy_rows(source, into, pairs)
            ended.record()
        self._under_way.append((began, ended))

    def take_ended(self) -> list[float]:
        """The seconds of each copy that has ended since the last call, in order."""
        seconds = []
        while self._under_way:
            began, ended = self._under_way[0]
            if not ended.query():  # type: ignore[no-untyped-call]
                break
            self._under_way.popleft()
            seconds.append(began.elapsed_time(ended) / 1000.0)
        return seconds
