"""Cuts a step's attention into pieces of similar size, before any layer runs.

A piece is (some queries of one sequence) x (some of its keys). Few queries over many keys are cut
along the keys, so that one long sequence fills a whole device; many queries are cut along the
queries. So one kernel computes skewed batches, single tokens, verification of drafts, and prompts
over a cached prefix. This is pure arithmetic on the host, without tensors or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """The partial results [first_partial, first_partial + num_partials) belong to one sequence."""

    sequence: int
    first_partial: int
    num_partials: int
    num_queries: int


def split_keys(
    rows: Sequence[tuple[int, int, int]], window: int | None, tile: int, num_pieces: int
) -> tuple[list[AttentionPiece], list[Reduction]]:
    """Cut sequences with few queries along their keys.

    Args:
        rows: (sequence, query_len, context_len) of each sequence.
        window: number of positions that a token sees; None: all.
        tile: keys per inner step of the kernel; cuts are at its multiples.
        num_pieces: how many pieces would fill the device.
    """
    spans = []
    for sequence, query_len, context_len in rows:
        oldest = 0 if window is None else max(context_len - query_len - window + 1, 0)
        spans.append((sequence, query_len, oldest // tile * tile, context_len))
    num_keys = sum(end - start for *_, start, end in spans)
    size = max(-(-num_keys // max(num_pieces, 1)), MIN_SPLIT_KEYS)
    size = -(-size // tile) * tile
    pieces, reductions = [], []
    num_partials = 0
    for sequence, query_len, start, end in spans:
        count = -(-(end - start) // size)
        if count == 1:
            pieces.append(AttentionPiece(sequence, 0, query_len, start, end, -1))
            continue
        for index in range(count):
            first = start + index * size
            last = min(first + size, end)
            pieces.append(AttentionPiece(sequence, 0, query_len, first, last, num_partials + index))
        reductions.append(Reduction(sequence, num_partials, count, query_len))
        num_partials += count
    return _largest_first(pieces), reductions


def split_queries(
    rows: Sequence[tuple[int, int, int]], window: int | None, tile: int, queries_per_piece: int
) -> list[AttentionPiece]:
    """Cut sequences with many queries along their queries. Arguments: see `split_keys`."""
    pieces = []
    for sequence, query_len, context_len in rows:
        cached = context_len - query_len
        for first in range(0, query_len, queries_per_piece):
            count = min(queries_per_piece, query_len - first)
            oldest = 0 if window is None else max(cached + first - window + 1, 0)
            end = cached + first + count
            pieces.append(AttentionPiece(sequence, first, count, oldest // tile * tile, end, -1))
    return _largest_first(pieces)


def _largest_first(pieces: list[AttentionPiece]) -> list[AttentionPiece]:
    """Sort the pieces, longest first, so that no long piece runs alone at the end."""
    return sorted(pieces, key=lambda piece: piece.start - piece.end)


def latent_group(num_heads: int) -> int:
    """The number of query heads of one program of latent attention; it divides `num_heads`."""
    sizes = range(min(MAX_LATENT_GROUP, num_heads), 0, -1)
    return next(size for size in sizes if num_heads % size == 0)
