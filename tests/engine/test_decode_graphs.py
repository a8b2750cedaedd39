"""Which steps are captured; that they equal plain ones is in `interpreted_graphs`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.decode_graphs import capture_sizes
from tests.kernels.interpreter import run_interpreted


@given(st.integers(1, 1024))
def test_every_number_of_sequences_has_a_graph_with_few_idle_rows(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < (8 if num_seqs <= 248 else 32)


@pytest.mark.timeout(600)
def test_graphs_equal_plain_steps_under_the_interpreter() -> None:
    run_interpreted("tests/engine/interpreted_graphs.py")
