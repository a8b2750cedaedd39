"""Pieces of work cover every visible key of every query exactly once, and are evenly sized."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from disagg.kernels.attention_work import MIN_SPLIT_KEYS, split_keys, split_queries

TILE = 64
lengths = st.tuples(st.integers(1, 8), st.integers(0, 3000)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1])
)
windows = st.none() | st.integers(1, 2000)


@given(st.lists(lengths, min_size=1, max_size=8), windows, st.integers(1, 200))
def test_keys_are_covered_once(
    lens: list[tuple[int, int]], window: int | None, num_pieces: int
) -> None:
    rows = [(sequence, *own) for sequence, own in enumerate(lens)]
    pieces, reductions = split_keys(rows, window, TILE, num_pieces)
    for sequence, query_len, context_len in rows:
        own = sorted((p for p in pieces if p.sequence == sequence), key=lambda p: p.start)
        oldest = 0 if window is None else max(context_len - query_len - window + 1, 0)
        assert own[0].start <= oldest < own[0].start + TILE
        assert own[-1].end == context_len
        assert all(a.end == b.start for a, b in pairwise(own))
        assert all(piece.start % TILE == 0 and piece.end > piece.start for piece in own)
        merge = [reduction for reduction in reductions if reduction.sequence == sequence]
        if len(own) == 1:
            assert own[0].partial == -1
            assert not merge
        else:
            (only,) = merge
            first, count = only.first_partial, only.num_partials
            assert [piece.partial for piece in own] == list(range(first, first + count))
    slots = [piece.partial for piece in pieces if piece.partial >= 0]
    assert sorted(slots) == list(range(len(slots)))


def test_one_long_sequence_fills_the_device() -> None:
    pieces, _ = split_keys([(0, 1, 100_000)], None, TILE, 40)
    sizes = [piece.end - piece.start for piece in pieces]
    assert 38 <= len(pieces) <= 40
    assert max(sizes) <= 1.1 * 100_000 / 38


def test_short_contexts_are_not_cut() -> None:
    pieces, reductions = split_keys([(0, 1, MIN_SPLIT_KEYS)], None, TILE, 1000)
    assert len(pieces) == 1
    assert not reductions


@given(st.integers(1, 700), st.integers(0, 3000), windows, st.integers(1, 128))
def test_queries_are_covered_once_with_all_they_see(
    query_len: int, cached: int, window: int | None, per_piece: int
) -> None:
    pieces = split_queries([(3, query_len, cached + query_len)], window, TILE, per_piece)
    pieces.sort(key=lambda piece: piece.first_query)
    covered = [q for p in pieces for q in range(p.first_query, p.first_query + p.num_queries)]
    assert covered == list(range(query_len))
    for piece in pieces:
        first = cached + piece.first_query
        oldest = 0 if window is None else max(first - window + 1, 0)
        assert piece.num_queries <= per_piece
        assert piece.start <= oldest < piece.start + TILE
        assert piece.end == first + piece.num_queries
        assert piece.partial == -1
