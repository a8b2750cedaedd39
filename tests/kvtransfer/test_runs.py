from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.kvtransfer.runs import BlockRun, merge_runs

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
