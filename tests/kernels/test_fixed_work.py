"""Work of a fixed shape has the pieces of a plain step, and zeros for the rows that are idle."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.kernels.attention_work import split_keys
from disagg.kernels.fixed_work import FixedWork
from disagg.kernels.paged_attention import KEY_TILE

CPU = torch.device("cpu")
NO_PIECE, NO_REDUCTION = [0, 0, 0, 0, 0, -1], [0, 0, 0, 0]


@given(
    st.lists(st.integers(1, 5000), min_size=0, max_size=12),
    st.integers(0, 4),
    st.none() | st.integers(1, 2000),
    st.integers(1, 200),
)
def test_all_pieces_fit_and_idle_rows_become_zeros(
    contexts: list[int], num_idle: int, window: int | None, num_programs: int
) -> None:
    num_seqs = max(1, len(contexts) + num_idle)
    fixed = FixedWork(num_seqs, 4, window, num_programs, CPU)
    (launch,) = fixed.work.launches
    fixed.fill([7] * num_seqs)  # what a step before it left
    fixed.fill(contexts)

    rows = [(row, 1, context) for row, context in enumerate(contexts)]
    pieces, reductions = split_keys(rows, window, KEY_TILE, num_programs)
    wanted = [[p.sequence, 0, 1, p.start, p.end, p.partial] for p in pieces]
    wanted += [[row, 0, 1, 0, 0, -1] for row in range(len(contexts), num_seqs)]
    found = launch.pieces.tolist()
    assert found[: len(wanted)] == wanted
    assert all(piece == NO_PIECE for piece in found[len(wanted) :])
    merges = [[r.sequence, r.first_partial, r.num_partials, 1] for r in reductions]
    found = launch.reductions.tolist()
    assert found[: len(merges)] == merges
    assert all(reduction == NO_REDUCTION for reduction in found[len(merges) :])
    assert sum(r.num_partials for r in reductions) <= launch.num_partials
    assert launch.pieces.shape[0] == num_seqs + num_programs
    assert len(found) == min(num_seqs, num_programs)
