from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import pytest

from disagg.errors import StartupError
from disagg.kvtransfer.slab import Slab, allocate_host, touch


def test_blocks_lie_one_after_the_other() -> None:
    slab = Slab(4096, num_blocks=3, block_nbytes=64, layout="l")
    assert [slab.address(block) for block in range(3)] == [4096, 4160, 4224]
    assert slab.nbytes == 192


@pytest.mark.parametrize("numbers", [(0, 1, 1, -1), (1, 0, 1, -1), (1, 1, -4, -1), (1, 1, 1, -2)])
def test_impossible_numbers_are_refused(numbers: tuple[int, int, int, int]) -> None:
    base_address, num_blocks, block_nbytes, device_id = numbers
    with pytest.raises(StartupError):
        Slab(base_address, num_blocks, block_nbytes, "l", device_id)


def test_the_owner_of_the_memory_is_not_part_of_the_identity() -> None:
    assert Slab(1, 1, 1, "l", owner=object()) == Slab(1, 1, 1, "l")


def test_host_memory_is_zeroed_and_begins_at_a_page() -> None:
    memory = allocate_host(3 * mmap.PAGESIZE)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % mmap.PAGESIZE == 0
    assert memory[:] == bytes(3 * mmap.PAGESIZE)
    memory[-1] = 7


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 62, 1 << 80])
def test_impossible_sizes_of_host_memory_are_refused(nbytes: int) -> None:
    with pytest.raises(StartupError, match="host memory"):
        allocate_host(nbytes)


def test_all_memory_is_there_soon_and_what_was_written_stays() -> None:
    """Not one page of a cache is first met by a request."""
    nbytes = 96 << 20
    before = resident_nbytes()
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[5] = 7
    assert resident_nbytes() < before + nbytes // 2
    assert touch(memory)
    assert resident_nbytes() > before + nbytes * 9 // 10
    assert memory[5] == 7 and memory[-1] == 0


def test_a_slab_is_touched_by_itself() -> None:
    nbytes = 96 << 20
    before = resident_nbytes()
    memory = allocate_host(nbytes)
    (thread,) = [each for each in threading.enumerate() if each.name == "touch"]
    thread.join()
    assert resident_nbytes() > before + nbytes * 9 // 10 and memory[-1] == 0


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
