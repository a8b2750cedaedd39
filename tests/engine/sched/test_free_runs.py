"""Runs of free blocks against a plain set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.sched.free_runs import FreeRuns

NUM_BLOCKS = 40


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.randoms(use_true_random=False))))
def test_behaves_like_a_set_kept_in_maximal_runs(
    moves: list[tuple[bool, int, object]],
) -> None:
    runs, free = FreeRuns(NUM_BLOCKS), set(range(NUM_BLOCKS))
    taken: list[int] = []
    for takes, num_blocks, rng in moves:
        if takes and num_blocks <= len(free):
            got = runs.take(num_blocks, apart=rng.random() < 0.5)  # type: ignore[attr-defined]
            assert len(set(got)) == num_blocks and set(got) <= free
            free.difference_update(got)
            taken.extend(got)
        elif taken:
            rng.shuffle(taken)  # type: ignore[attr-defined]
            for block_id in taken[:num_blocks]:
                runs.add(block_id)
                free.add(block_id)
            del taken[:num_blocks]
        assert runs.num_free == len(free)
        spans = runs.runs()
        assert {i for start, end in spans for i in range(start, end)} == free
        assert all(a_end < b_start for (_, a_end), (b_start, _) in itertools.pairwise(spans))


def test_a_run_that_is_long_enough_is_found() -> None:
    runs = FreeRuns(64)
    runs.take(64)
    for block_id in (*range(0, 40, 2), *range(44, 60)):
        runs.add(block_id)
    got = runs.take(16)
    assert got == list(range(44, 60))


def test_a_single_block_does_not_break_up_a_long_run() -> None:
    runs = FreeRuns(64)
    runs.take(64)
    for block_id in (*range(8, 40), 50):
        runs.add(block_id)
    assert runs.take(1) == [50]


def test_blocks_for_as_many_owners_use_up_the_short_runs() -> None:
    runs = FreeRuns(64)
    runs.take(64)
    for block_id in (*range(8, 40), 50, 52, 53):
        runs.add(block_id)
    assert runs.take(4, apart=True) == [50, 52, 53, 8]
    assert runs.take(3) == [9, 10, 11]


def test_asking_for_too_many_is_an_error() -> None:
    runs = FreeRuns(3)
    with pytest.raises(ValueError, match="more blocks"):
        runs.take(4)
