"""What `narrow_rows` passes to the compiled program."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as functional

from disagg.kernels.cpu.matrix import CpuMatrix
from disagg.kernels.cpu.narrow_rows import narrow_rows

NUM_IN = 8


class FakeLibrary:
    """Computes nothing, and keeps the rows that the compiled program may read."""

    def __init__(self, has_tiles: bool, num_read: int) -> None:
        self._has_tiles, self._num_read = has_tiles, num_read
        self.address, self.read, self.status = 0, b"", 0

    def disagg_step_has_tiles(self) -> int:
        return self._has_tiles

    def disagg_step_narrow_rows(self, matrix: Any, x: ctypes.c_void_p, *_: Any) -> int:
        assert x.value is not None
        self.address = x.value
        self.read = ctypes.string_at(x.value, self._num_read * NUM_IN * 2)
        return self.status


@pytest.mark.parametrize(
    ("num_rows", "has_tiles", "num_read"),
    [(16, True, 16), (17, True, 32), (32, True, 32), (17, False, 17)],
)
def test_rows_are_padded_only_if_whole_tiles_are_read(
    num_rows: int, has_tiles: bool, num_read: int
) -> None:
    x = torch.randn(num_rows, NUM_IN).bfloat16()
    library = FakeLibrary(has_tiles, num_read)
    narrow_rows(cast(ctypes.CDLL, library), CpuMatrix(num_out=4, num_in=NUM_IN), x)
    padded = functional.pad(x, (0, 0, 0, num_read - num_rows))
    assert library.read == padded.view(torch.uint8).numpy().tobytes()
    assert (library.address == x.data_ptr()) == (num_read == num_rows)


def test_no_memory_is_an_error() -> None:
    library = FakeLibrary(has_tiles=False, num_read=3)
    library.status = 1
    with pytest.raises(MemoryError, match="a product of 3 rows"):
        narrow_rows(
            cast(ctypes.CDLL, library),
            CpuMatrix(num_out=4, num_in=NUM_IN),
            torch.randn(3, NUM_IN).bfloat16(),
        )
