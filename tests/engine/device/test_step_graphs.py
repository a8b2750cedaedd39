"""Which steps are captured; that they equal plain ones is in `interpreted_graphs`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.device.batching import MAX_PROMPT_TOKENS
from disagg.engine.device.step_graphs import graph_sizes
from disagg.engine.sched.speculation import MAX_AHEAD


@given(st.integers(1, 1024))
def test_every_number_of_sequences_has_a_graph_with_few_idle_rows(max_num_seqs: int) -> None:
    sizes = [size.num_tokens for size in graph_sizes(max_num_seqs) if size.are_decodes]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < (8 if num_seqs <= 248 else 32)


@given(st.integers(1, 1024))
def test_prompts_and_drafts_have_graphs_with_few_idle_tokens(max_num_seqs: int) -> None:
    """Also beside as many decodes as there may be."""
    sizes = [size.num_tokens for size in graph_sizes(max_num_seqs) if not size.are_decodes]
    assert sizes[-1] == max(max_num_seqs + MAX_AHEAD, MAX_PROMPT_TOKENS)
    assert all(0 < after - before <= 32 for before, after in pairwise([0, *sizes]))
