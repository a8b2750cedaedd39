"""Which steps are captured; that they equal plain ones is in `interpreted_graphs`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.decode_graphs import capture_sizes

ROOT = Path(__file__).parents[2]


@given(st.integers(1, 1024))
def test_every_number_of_sequences_has_a_graph_with_few_idle_rows(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < (8 if num_seqs <= 248 else 32)


@pytest.mark.timeout(300)
def test_graphs_equal_plain_steps_under_the_interpreter() -> None:
    """The interpreter is chosen when Triton is imported, hence a process of its own."""
    command = [sys.executable, "-m", "pytest", "tests/engine/interpreted_graphs.py", "-x"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
