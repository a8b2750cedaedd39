"""Copies blocks between a GPU's cache and pinned host memory, concurrently with the kernels.

One CUDA stream per direction, since PCIe is full duplex. On the device a copy waits for the work
that was launched before it; the host never waits, but polls which copies have ended.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.errors import StartupError
from disagg.kvtransfer.runs import merge_runs
from disagg.kvtransfer.slab import allocate_host


class PinnedMemory:
    """Pinned host memory.

    We allocate it and register it with CUDA: torch's own pinned memory is rounded up to a power of
    two, and 40 GiB would take 64.

    Attributes:
        bytes: uint8.

    Raises:
        StartupError: there is not enough memory, or the limit of pinned memory is too low.
    """

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.frombuffer(allocate_host(nbytes), dtype=torch.uint8)
        try:
            self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(self._cudart.cudaHostRegister(self.bytes.data_ptr(), nbytes, 0))
        except (AssertionError, RuntimeError) as no_cuda:
            raise _not_pinned(nbytes, str(no_cuda)) from no_cuda
        if error:
            raise _not_pinned(nbytes, f"CUDA error {error}")

        # Also if `close` is not called: freed memory must not stay registered.
        unregister = self._cudart.cudaHostUnregister
        self._end = weakref.finalize(self, unregister, self.bytes.data_ptr())
        self._end.atexit = False  # CUDA is gone by then, and the memory with the process

    def close(self) -> None:
        """Free the memory. No copy may be running."""
        self._end()


def _not_pinned(nbytes: int, reason: str) -> StartupError:
    return StartupError(
        f"{nbytes} bytes of host memory cannot be pinned for evicted KV blocks ({reason});"
        " lower kv_offloading_size, or raise the limit of locked memory (ulimit -l).",
        param="kv_offloading_size",
    )


class StreamCopier:
    """A `store.block_copier.BlockCopier` on CUDA streams; belongs to the engine's thread.

    Args:
        cache: one row a block, on the GPU.
        num_slots: rows of host memory.

    Raises:
        StartupError: the memory cannot be pinned.
    """

    def __init__(self, cache: Tensor, num_slots: int) -> None:
        self._cache = cache
        shape = (num_slots, *cache.shape[1:])
        self._memory = PinnedMemory(num_slots * cache[0].numel() * cache.itemsize)
        self._host = self._memory.bytes.view(cache.dtype).view(shape)
        self._saves, self._loads = _Way(cache.device), _Way(cache.device)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._saves.copy(self._cache, self._host, pairs)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._loads.copy(self._host, self._cache, pairs)

    def take_saved(self) -> int:
        return len(self._saves.take_ended())

    def wait_saved(self) -> None:
        """Wait until all saves have ended."""
        self._saves.wait()

    def take_loaded(self) -> list[float]:
        return self._loads.take_ended()

    def read_slot(self, slot: int) -> bytes:
        row = self._host[slot]
        return ctypes.string_at(row.data_ptr(), row.numel() * row.itemsize)

    def close(self) -> None:
        torch.cuda.synchronize(self._cache.device)  # nothing may write to freed memory
        self._memory.close()


class BlockReader:
    """Reads blocks of a GPU's cache; blocks of one call at the speed of the bus.

    Args:
        cache: one row a block, on the GPU.
        num_slots: how many are copied before the host waits for them.
    """

    def __init__(self, cache: Tensor, num_slots: int) -> None:
        self._num_slots = num_slots
        self._copier = StreamCopier(cache, num_slots)

    def __call__(self, block_ids: Sequence[int]) -> list[bytes]:
        """The bytes of blocks, after all work that was launched before. Waits for it."""
        read: list[bytes] = []
        for first in range(0, len(block_ids), self._num_slots):
            some = block_ids[first : first + self._num_slots]
            self._copier.save([(block_id, slot) for slot, block_id in enumerate(some)])
            self._copier.wait_saved()
            read += map(self._copier.read_slot, range(len(some)))
        return read


class _Way:
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
            for first, into_first, num_rows in merge_runs(pairs):
                rows = source[first : first + num_rows]
                into[into_first : into_first + num_rows].copy_(rows, non_blocking=True)
            ended.record()
        self._under_way.append((began, ended))

    def wait(self) -> None:
        """Wait until every copy has ended; they then count as reported."""
        self._stream.synchronize()
        self._under_way.clear()

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
