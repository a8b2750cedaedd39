"""How many neighbours in a row of a weight of 4 bits share a scale. Knows no torch."""

from __future__ import annotations

_SIZES = (128, 64, 32)


def group_size(num_in: int) -> int:
    """The largest that divides a row; otherwise the last group of a row is shorter."""
    return next((size for size in _SIZES if num_in % size == 0), _SIZES[0])


def num_groups(num_in: int) -> int:
    return -(-num_in // group_size(num_in))
