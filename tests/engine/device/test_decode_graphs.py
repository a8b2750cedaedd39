"""Which steps are captured; that they equal plain ones is in `interpreted_graphs`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.device.decode_graphs import capture_sizes
from disagg.engine.device.mixed_graphs import MAX_PROMPT_TOKENS, mixed_sizes
from disagg.engine.sched.speculation import MAX_AHEAD


@given(st.integers(1, 1024))
def test_every_number_of_sequences_has_a_graph_with_few_idle_rows(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < (8 if num_seqs <= 248 else 32)


@given(st.integers(1, 1024), st.booleans())
def test_prompts_and_drafts_have_graphs_with_few_idle_tokens(
    max_num_seqs: int, with_drafts: bool
) -> None:
    sizes = mixed_sizes(max_num_seqs, with_drafts)
    assert sizes == sorted(set(sizes))
    few = [size.num_tokens for size in sizes if size.num_logits < size.num_tokens]
    every = [size.num_tokens for size in sizes if size.num_logits == size.num_tokens]
    assert few[-1] == MAX_PROMPT_TOKENS and bool(every) == with_drafts
    for tokens in (few, every):
        assert all(after - before <= 32 for before, after in pairwise([0, *tokens]))
    assert not every or every[-1] == max_num_seqs + MAX_AHEAD
