"""Memory moves into huge pages with its contents."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from disagg.kernels.huge_pages import HUGE_NBYTES, use_huge_pages

OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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


def test_a_region_is_moved_and_keeps_what_is_in_it() -> None:
    if not OFFERED.exists() or "[never]" in OFFERED.read_text():
        pytest.skip("this system offers no huge pages")
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    content = bytes(range(256)) * (NBYTES // 256)
    memory[:] = content
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    assert _num_huge_nbytes(address) == 0
    moved = use_huge_pages([(address + 5, NBYTES - 10)])
    if moved == 0:
        pytest.skip("this kernel does not move memory into huge pages when asked")
    assert NBYTES - 2 * HUGE_NBYTES <= moved <= NBYTES + 2 * HUGE_NBYTES
    assert _num_huge_nbytes(address) >= NBYTES - 2 * HUGE_NBYTES
    assert memory[:] == content


def test_memory_that_is_not_there_is_left_alone() -> None:
    assert use_huge_pages([]) == 0
    assert use_huge_pages([(HUGE_NBYTES, 1)]) == 0
