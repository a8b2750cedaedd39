"""Moves memory that every step reads into huge pages.

A weight of 100 MB has 25,000 pages of 4 KB, more than a CPU's TLB holds, so products with few rows
read it at half the speed of memory. Linux gives huge pages only to large new mappings; its
background thread takes minutes or hours to move existing memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

HUGE_NBYTES = 2 << 20
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it yet


def use_huge_pages(regions: Iterable[tuple[int, int]]) -> int:
    """Move memory regions, each an address and a number of bytes, without changing their contents.

    Returns how many bytes are in huge pages now; 0 if the system does not support it. Whole huge
    pages of 2 MB are moved, including other memory in the first and the last one.
    """
    pages = {
        number
        for address, nbytes in regions
        for number in range(address // HUGE_NBYTES, (address + nbytes - 1) // HUGE_NBYTES + 1)
    }
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_moved = 0
    for number in sorted(pages):
        address = number * HUGE_NBYTES
        # The first call also tells the system's background thread, for kernels without the second.
        madvise(address, HUGE_NBYTES, MADV_HUGEPAGE)
        num_moved += madvise(address, HUGE_NBYTES, MADV_COLLAPSE) == 0
    return num_moved * HUGE_NBYTES
