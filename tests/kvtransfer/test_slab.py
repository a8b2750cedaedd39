from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import StartupError
from disagg.kvtransfer.slab import (
    GENERATION_NBYTES,
    BlockRun,
    Slab,
    Stamps,
    allocate_host,
    first_generation,
    merge_runs,
    touch,
)
from tests.grids import examples


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


SIDES = st.integers(0, 24).flatmap(
    lambda n: st.tuples(
        st.permutations(range(32)).map(lambda ids: ids[:n]),
        st.permutations(range(32)).map(lambda ids: ids[:n]),
    )
)


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert merge_runs([(3, 7), (4, 8), (5, 9)]) == [BlockRun(3, 7, 3)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    assert merge_runs([(3, 7), (4, 9)]) == [BlockRun(3, 7, 1), BlockRun(4, 9, 1)]
    assert merge_runs([(3, 7), (5, 8)]) == [BlockRun(3, 7, 1), BlockRun(5, 8, 1)]


def test_order_does_not_matter() -> None:
    assert merge_runs([(5, 9), (3, 7), (4, 8)]) == [BlockRun(3, 7, 3)]


@given(SIDES)
def test_runs_copy_exactly_the_pairs_and_none_could_be_merged(
    sides: tuple[list[int], list[int]],
) -> None:
    pairs = set(zip(*sides, strict=True))
    runs = merge_runs(pairs)
    copied = [(run.source_block + i, run.local_block + i) for run in runs for i in range(run[2])]
    assert len(copied) == len(pairs) and set(copied) == pairs
    starts = {(run.source_block, run.local_block) for run in runs}
    ends = {(run.source_block + run.num_blocks, run.local_block + run.num_blocks) for run in runs}
    assert starts.isdisjoint(ends)


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


@examples(30)
@given(st.text(max_size=8), st.integers(0, 2**64), st.text(max_size=8), st.integers(0, 2**64))
def test_no_two_processes_start_with_the_same_generation(
    worker: str, epoch: int, other_worker: str, other_epoch: int
) -> None:
    first, other = first_generation(worker, epoch), first_generation(other_worker, other_epoch)
    assert (first == other) == ((worker, epoch) == (other_worker, other_epoch))
    assert 0 < first < 1 << 63
