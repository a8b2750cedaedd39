from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import StartupError
from disagg.kvtransfer.stamps import GENERATION_NBYTES, Stamps, first_generation


def test_a_bump_is_seen_at_the_tables_address() -> None:
    stamps = Stamps(4, "w", epoch=1)
    before = stamps.of([2, 0])
    stamps.generations[2] += 1
    seen = (ctypes.c_uint64 * 4).from_address(stamps.address)
    assert stamps.nbytes == 4 * GENERATION_NBYTES
    assert tuple(seen) == stamps.of(range(4))
    assert stamps.of([2, 0]) == (before[0] + 1, before[1])


def test_the_table_cannot_move() -> None:
    stamps = Stamps(4, "w", epoch=1)
    with pytest.raises(BufferError):
        stamps.generations.append(0)


def test_a_table_needs_blocks() -> None:
    with pytest.raises(StartupError):
        Stamps(0, "w", epoch=1)


@given(st.text(max_size=8), st.integers(0, 2**64), st.text(max_size=8), st.integers(0, 2**64))
def test_no_two_processes_start_with_the_same_generation(
    worker: str, epoch: int, other_worker: str, other_epoch: int
) -> None:
    first, other = first_generation(worker, epoch), first_generation(other_worker, other_epoch)
    assert (first == other) == ((worker, epoch) == (other_worker, other_epoch))
    assert 0 < first < 1 << 63
