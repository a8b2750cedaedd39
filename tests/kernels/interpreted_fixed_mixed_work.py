"""The device's cut of steps with prompts and drafts; run by `test_interpreted.py` under Triton's
interpreter."""

from __future__ import annotations

from dataclasses import astuple
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.kernels.gpu.attention_work import cut
from disagg.kernels.gpu.fixed_mixed_work import MAX_SHORT_QUERIES, FixedMixedWork
from disagg.kernels.gpu.paged_work import KEY_TILE

GROUP = 4
NO_PIECE = [0, 0, 0, 0, 0, -1]
steps = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3000)), max_size=6)


def numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(deadline=None, max_examples=25)
@given(steps, st.integers(0, 70), st.none() | st.integers(1, 2000), st.integers(1, 200))
def test_every_query_sees_its_keys_once(
    sequences: list[tuple[int, int]], num_idle: int, window: int | None, num_programs: int
) -> None:
    query_lens = [query_len for query_len, _ in sequences]
    context_lens = [query_len + cached for query_len, cached in sequences]
    num_tokens = max(1, sum(query_lens) + num_idle)
    num_idle = num_tokens - sum(query_lens)
    num_seqs = len(sequences) + 1
    work = FixedMixedWork(num_seqs, num_tokens, GROUP, window, num_programs, torch.device("cpu"))
    # What a step before it left, in the lists and in the tensors that they are made of.
    work.cut(numbers([0, num_tokens]), numbers([num_tokens + 99]), 1)
    starts = [*accumulate(query_lens, initial=0), num_tokens, 7]
    work.cut(numbers(starts), numbers([*context_lens, 2100, 2100]), len(sequences))
    short, long = work.work.launches

    rows = [(i, *pair) for i, pair in enumerate(zip(query_lens, context_lens, strict=True))]
    few = [row for row in rows if row[1] <= MAX_SHORT_QUERIES]
    pieces, merges = cut(few, window, KEY_TILE, num_programs, MAX_SHORT_QUERIES)
    wanted = [[p.sequence, 0, p.num_queries, p.start, p.end, p.partial] for p in pieces]
    found = short.pieces.tolist()
    assert found[: len(wanted)] == wanted
    assert all(piece == NO_PIECE for piece in found[len(wanted) :])
    wanted = [list(astuple(merge)) for merge in merges]
    found = short.reductions.tolist()
    assert found[: len(wanted)] == wanted
    assert all(reduction == [0, 0, 0, 0, 0] for reduction in found[len(wanted) :])
    assert sum(r.num_partials for r in merges) <= short.num_partials

    seen: dict[int, list[int]] = {}
    for sequence, first, count, start, end, partial in long.pieces.tolist():
        assert partial == -1 and count * GROUP <= long.rows
        if not count:
            assert [sequence, first, count, start, end, partial] == NO_PIECE
            continue
        seen.setdefault(sequence, []).extend(range(first, first + count))
        if sequence < len(rows):
            _, query_len, context_len = rows[sequence]
            assert end == context_len - query_len + first + count
            assert start <= max(0, end - count - (window or end) + 1)
        else:
            assert (start, end) == (0, 0)
    for sequence, query_len, _ in rows:
        wanted_queries = [] if query_len <= MAX_SHORT_QUERIES else list(range(query_len))
        assert sorted(seen.get(sequence, [])) == wanted_queries
    assert sorted(seen.get(len(rows), [])) == list(range(num_idle))
