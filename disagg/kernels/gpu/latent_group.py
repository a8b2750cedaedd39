"""How many query heads a program of latent attention has. Knows no Triton."""

from __future__ import annotations

# A matrix product needs at least so many rows, and with one token each head is one row.
MAX_LATENT_GROUP = 16


def latent_group(num_heads: int) -> int:
    """The number of query heads of one program; it divides `num_heads`."""
    sizes = range(min(MAX_LATENT_GROUP, num_heads), 0, -1)
    return next(size for size in sizes if num_heads % size == 0)
