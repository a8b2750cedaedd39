"""The slab: the memory of a worker's KV blocks, each block one contiguous run of bytes.

Knows addresses and sizes. Must not know what the bytes mean, nor who allocated them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
from dataclasses import dataclass, field
from typing import Protocol

from disagg.errors import StartupError

HOST = -1
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet
STRIDE_NBYTES = 64 << 20  # per call of the kernel, between which others may use the mapping's lock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The bytes of each block that are in a slab, if the ranks of a worker divide blocks.

    begin: their offset in the whole block.
    whole_nbytes: size of the whole block.
    copy: number of the slab among those of the worker with the same bytes.
    """

    begin: int
    whole_nbytes: int
    copy: int = 0


class Divided(Protocol):
    """A slab, or a peer's description of one."""

    @property
    def block_nbytes(self) -> int: ...

    @property
    def part(self) -> BlockPart | None: ...


def begin_of(slab: Divided) -> int:
    """The offset of the slab's bytes in whole blocks."""
    return 0 if slab.part is None else slab.part.begin


def whole_nbytes(slab: Divided) -> int:
    """The size of a whole block, of which the slab may have a part."""
    return slab.block_nbytes if slab.part is None else slab.part.whole_nbytes


@dataclass(frozen=True, slots=True)
class Slab:
    """Memory of `num_blocks` blocks; block i begins at `base_address + i * block_nbytes`.

    Args:
        layout: fingerprint of everything that must match for the bytes to be interchangeable: of
            whole blocks, and so the same on all ranks.
        part: the part of whole blocks that it has; None: all of them.
        device_id: -1 for host memory, otherwise the GPU's index.
        owner: whatever frees the memory; kept alive as long as the slab is.

    Raises:
        StartupError: an address or a size that cannot be.
    """

    base_address: int
    num_blocks: int
    block_nbytes: int
    layout: str
    device_id: int = HOST
    owner: object = field(default=None, compare=False, repr=False)
    part: BlockPart | None = None

    def __post_init__(self) -> None:
        if self.base_address <= 0 or self.num_blocks <= 0 or self.block_nbytes <= 0:
            raise StartupError(
                f"a slab needs a positive address, number of blocks and block size, got {self}"
            )
        if begin_of(self) < 0 or begin_of(self) + self.block_nbytes > whole_nbytes(self):
            raise StartupError(f"a slab's part of blocks lies within whole blocks, got {self}")
        if self.device_id < HOST:
            raise StartupError(f"device_id is -1 (host memory) or a GPU's index, got {self}")

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_nbytes

    def address(self, block_id: int) -> int:
        return self.base_address + block_id * self.block_nbytes


def allocate_host(nbytes: int) -> mmap.mmap:
    """Zeroed host memory for a slab, page-aligned, in huge pages where the system offers them.

    Reading another process's memory costs the kernel a look-up per page of the source: with huge
    pages 1.8 GB/s instead of 1.0 where a memcpy makes 2.5.

    A thread starts to touch all of it, so that a process has its full size soon after its start,
    and not only when requests have used every block.

    Raises:
        StartupError: there is not that much memory.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise StartupError(f"no {nbytes} bytes of host memory for KV blocks: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    threading.Thread(target=touch, args=(memory,), name="touch", daemon=True).start()
    return memory


def touch(memory: mmap.mmap) -> bool:
    """Make the system allocate all pages of a mapping now. Their contents stay.

    Returns whether it did. Otherwise each page is allocated when it is first written.
    """
    view = ctypes.c_char.from_buffer(memory)  # the mapping stays while this lives
    libc = ctypes.CDLL(None, use_errno=True)
    begin, nbytes = ctypes.addressof(view), len(memory)
    for start in range(0, nbytes, STRIDE_NBYTES):
        size = min(STRIDE_NBYTES, nbytes - start)
        address = ctypes.c_void_p(begin + start)
        if libc.madvise(address, ctypes.c_size_t(size), MADV_POPULATE_WRITE):
            log.info("Memory for KV blocks comes as it is used: errno %d.", ctypes.get_errno())
            return False
    return True
