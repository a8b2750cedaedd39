"""Memory moves into huge pages with its contents, or stays as it is."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from disagg.kernels.cpu.huge_pages import HUGE_NBYTES, MADV_COLLAPSE, use_huge_pages

NBYTES = 8 * HUGE_NBYTES


def _num_huge_nbytes(address: int) -> int:
    """Of the mapping that an address is in."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_in = begin <= address < end
        elif is_in and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    return 0


def _num_that_can_move() -> int:
    """Of a region's pages: how many this system moves when it is asked for each; 0 on old ones."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[:] = bytes(NBYTES)
        view = ctypes.c_char.from_buffer(memory)
        begin = -(-ctypes.addressof(view) // HUGE_NBYTES) * HUGE_NBYTES
        end = ctypes.addressof(view) + NBYTES
        del view
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = range(begin, end - HUGE_NBYTES + 1, HUGE_NBYTES)
        return sum(madvise(page, HUGE_NBYTES, MADV_COLLAPSE) == 0 for page in pages)


def test_a_region_is_moved_and_keeps_what_is_in_it() -> None:
    """Or stays as it is, where the system moves nothing."""
    num_pages = _num_that_can_move()
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    content = bytes(range(256)) * (NBYTES // 256)
    memory[:] = content
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    assert _num_huge_nbytes(address) == 0
    moved = use_huge_pages([(address + 5, NBYTES - 10)])
    assert memory[:] == content
    assert (num_pages - 2) * HUGE_NBYTES <= moved <= NBYTES + 2 * HUGE_NBYTES
    assert _num_huge_nbytes(address) >= moved - 2 * HUGE_NBYTES
    if num_pages == 0:
        assert moved == 0


def test_memory_that_is_not_there_is_left_alone() -> None:
    assert use_huge_pages([]) == 0
    assert use_huge_pages([(HUGE_NBYTES, 1)]) == 0
