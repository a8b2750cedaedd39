"""Pieces of work cover every visible key of every query exactly once, and are evenly sized."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.kernels.gpu.attention_work import MIN_SPLIT_KEYS, cut
from disagg.kernels.gpu.paged_work import plan_work

TILE = 64
lengths = st.tuples(st.integers(1, 300), st.integers(0, 3000)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1])
)
windows = st.none() | st.integers(1, 2000)


@given(
    st.lists(lengths, min_size=1, max_size=8),
    windows,
    st.integers(1, 200),
    st.integers(1, 128),
    st.sampled_from([MIN_SPLIT_KEYS, 512, 1 << 20]),
)
def test_each_query_sees_its_keys_once(
    lens: list[tuple[int, int]],
    window: int | None,
    num_pieces: int,
    queries_per_piece: int,
    least_keys: int,
) -> None:
    rows = [(sequence, *own) for sequence, own in enumerate(lens)]
    pieces, reductions = cut(rows, window, TILE, num_pieces, queries_per_piece, least_keys)
    merges = {(each.sequence, each.first_query): each for each in reductions}
    assert len(merges) == len(reductions)
    for sequence, query_len, context_len in rows:
        own = [piece for piece in pieces if piece.sequence == sequence]
        firsts = sorted({piece.first_query for piece in own})
        assert firsts == list(range(0, query_len, queries_per_piece))
        for first_query in firsts:
            same = sorted((p for p in own if p.first_query == first_query), key=lambda p: p.start)
            num_queries = min(queries_per_piece, query_len - first_query)
            assert {piece.num_queries for piece in same} == {num_queries}
            first = context_len - query_len + first_query
            oldest = 0 if window is None else max(first - window + 1, 0)
            assert same[0].start <= oldest < same[0].start + TILE
            assert same[-1].end == first + num_queries
            assert all(a.end == b.start for a, b in pairwise(same))
            assert all(piece.start % TILE == 0 and piece.end > piece.start for piece in same)
            assert all(piece.end - piece.start >= least_keys for piece in same[:-1])
            merge = merges.pop((sequence, first_query), None)
            if len(same) == 1:
                assert merge is None and same[0].partial == -1
            else:
                assert merge is not None and merge.num_queries == num_queries
                wanted = range(merge.first_partial, merge.first_partial + merge.num_partials)
                assert [piece.partial for piece in same] == list(wanted)
    assert not merges
    partials = [piece.partial for piece in pieces if piece.partial >= 0]
    assert sorted(partials) == list(range(len(partials)))


@pytest.mark.parametrize("num_new", [1, 16, 200])
def test_one_long_context_fills_the_device(num_new: int) -> None:
    """Whatever the number of tiles: 16 tokens are one, and 200 are seven."""
    num_keys = 100_000 * -(-num_new // 32)
    pieces, _ = cut([(0, num_new, 100_000)], None, TILE, 40, 32)
    assert 38 <= len(pieces) <= 47
    assert max(piece.end - piece.start for piece in pieces) <= 1.1 * num_keys / 38


def test_short_contexts_are_not_cut() -> None:
    pieces, reductions = cut([(0, 1, MIN_SPLIT_KEYS)], None, TILE, 1000)
    assert len(pieces) == 1
    assert not reductions


@pytest.mark.parametrize(("num_new", "num_pieces"), [(100, 48), (3000, 94)])
def test_only_prompts_that_do_not_fill_the_device_have_partial_results(
    num_new: int, num_pieces: int
) -> None:
    (launch,) = plan_work([num_new], [30_000], 4, None, 48, torch.device("cpu")).launches
    assert len(launch.pieces) <= num_pieces + 4
    assert bool(launch.num_partials) == (num_new == 100)
