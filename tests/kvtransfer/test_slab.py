from __future__ import annotations

import ctypes
import mmap

import pytest

from disagg.errors import StartupError
from disagg.kvtransfer.slab import Slab, allocate_host


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
