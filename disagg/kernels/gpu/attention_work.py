"""Cuts a step's attention into pieces of similar size, before any layer runs.

A piece is (some queries of one sequence) x (some of its keys). A sequence is first cut into tiles
of queries, as many as the kernel computes together, and then along its keys, until the pieces fill
the device. So one kernel computes skewed batches, single tokens, verification of drafts, and a few
new tokens over a long cached prefix. This is pure arithmetic on the host, without tensors or
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIN_SPLIT_KEYS = 256  # a partial result costs about as much memory traffic as a few keys
# Query heads of a program of latent attention. A matrix product needs at least so many rows, and
# with one token each head is one row.
MAX_LATENT_GROUP = 16


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """Queries [first_query, first_query + num_queries) of a sequence's step, keys [start, end)."""

    sequence: int
    first_query: int
    num_queries: int
    start: int  # a multiple of the key tile
    end: int
    partial: int  # row of the unnormalised partial result; -1: the piece's result is final


@dataclass(frozen=True, slots=True)
class Reduction:
    """The partial results [first_partial, first_partial + num_partials) of the same queries."""

    sequence: int
    first_query: int
    num_queries: int
    first_partial: int
    num_partials: int


def cut(
    rows: Sequence[tuple[int, int, int]],
    window: int | None,
    tile: int,
    num_pieces: int,
    queries_per_piece: int = 1,
    least_keys: int = MIN_SPLIT_KEYS,
) -> tuple[list[AttentionPiece], list[Reduction]]:
    """Cut sequences into pieces of similar size.

    Args:
        rows: (sequence, query_len, context_len) of each sequence.
        window: number of positions that a token sees; None: all.
        tile: keys per inner step of the kernel; cuts are at its multiples.
        num_pieces: how many pieces would fill the device.
        queries_per_piece: most queries of a piece.
        least_keys: a piece with fewer is not worth its partial result.
    """
    whole = []
    for sequence, query_len, context_len in rows:
        for first_query in range(0, query_len, queries_per_piece):
            num_queries = min(queries_per_piece, query_len - first_query)
            first = context_len - query_len + first_query
            oldest = 0 if window is None else max(first - window + 1, 0)
            start, end = oldest // tile * tile, first + num_queries
            whole.append(AttentionPiece(sequence, first_query, num_queries, start, end, -1))
    num_keys = sum(piece.end - piece.start for piece in whole)
    size = max(-(-num_keys // max(num_pieces, 1)), least_keys)
    size = -(-size // tile) * tile
    pieces, reductions = [], []
    num_partials = 0
    for piece in whole:
        starts = range(piece.start, piece.end, size)
        if len(starts) == 1:
            pieces.append(piece)
            continue
        pieces += [
            replace(piece, start=start, end=min(start + size, piece.end), partial=partial)
            for partial, start in enumerate(starts, num_partials)
        ]
        queries = piece.sequence, piece.first_query, piece.num_queries
        reductions.append(Reduction(*queries, num_partials, len(starts)))
        num_partials += len(starts)
    return _largest_first(pieces), reductions


def _largest_first(pieces: list[AttentionPiece]) -> list[AttentionPiece]:
    """Sort the pieces, longest first, so that no long piece runs alone at the end."""
    return sorted(pieces, key=lambda piece: piece.start - piece.end)


def latent_group(num_heads: int) -> int:
    """The number of query heads of one program of latent attention; it divides `num_heads`."""
    sizes = range(min(MAX_LATENT_GROUP, num_heads), 0, -1)
    return next(size for size in sizes if num_heads % size == 0)
