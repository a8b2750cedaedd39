from __future__ import annotations

import pytest

from disagg.errors import StartupError
from disagg.kvtransfer.slab import Slab


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
