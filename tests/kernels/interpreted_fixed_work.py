"""The device's cut of decodes; run by `test_interpreted.py` under Triton's interpreter."""

from __future__ import annotations

from dataclasses import astuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.kernels.gpu.attention_work import cut
from disagg.kernels.gpu.fixed_work import FixedWork
from disagg.kernels.gpu.paged_work import KEY_TILE

CPU = torch.device("cpu")
NO_PIECE, NO_REDUCTION = [0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 5000) | st.sampled_from([256, 512, 1024]), min_size=0, max_size=12),
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
    before = torch.full((num_seqs,), 2100, dtype=torch.int32)
    fixed.cut(torch.zeros(num_seqs, dtype=torch.int64), before)
    slots = torch.where(torch.arange(num_seqs) < len(contexts), 0, -1)
    left = [2100] * (num_seqs - len(contexts))
    fixed.cut(slots, torch.tensor([*contexts, *left], dtype=torch.int32))

    rows = [(row, 1, context) for row, context in enumerate(contexts)]
    pieces, reductions = cut(rows, window, KEY_TILE, num_programs)
    wanted = [[p.sequence, 0, 1, p.start, p.end, p.partial] for p in pieces]
    wanted += [[row, 0, 1, 0, 0, -1] for row in range(len(contexts), num_seqs)]
    found = launch.pieces.tolist()
    assert found[: len(wanted)] == wanted
    assert all(piece == NO_PIECE for piece in found[len(wanted) :])
    merges = [list(astuple(reduction)) for reduction in reductions]
    found = launch.reductions.tolist()
    assert found[: len(merges)] == merges
    assert all(reduction == NO_REDUCTION for reduction in found[len(merges) :])
    assert sum(r.num_partials for r in reductions) <= launch.num_partials
    assert launch.pieces.shape[0] == num_seqs + num_programs
    assert len(found) == min(num_seqs, num_programs)


def test_a_large_step_is_cut_as_the_host_would() -> None:
    """More sequences than pieces fill the device, and every length next to a cut."""
    contexts = [1 + 97 * row % 4001 for row in range(70)] + [255, 256, 257, 8192, 1, 64]
    fixed = FixedWork(80, 4, None, 49, CPU)
    (launch,) = fixed.work.launches
    slots = torch.where(torch.arange(80) < len(contexts), 0, -1)
    fixed.cut(slots, torch.tensor([*contexts, 9, 9, 9, 9], dtype=torch.int32))
    rows = [(row, 1, context) for row, context in enumerate(contexts)]
    pieces, _ = cut(rows, None, KEY_TILE, 49)
    wanted = [[p.sequence, 0, 1, p.start, p.end, p.partial] for p in pieces]
    assert launch.pieces.tolist()[: len(wanted)] == wanted
