"""How many query heads a program of latent attention has, and scores an index. No Triton."""

from __future__ import annotations

# A matrix product needs at least so many rows, and with one token each head is one row.
MAX_LATENT_GROUP = 16


SCORES_NBYTES = 256 << 20  # of an index at one time; more are computed one part after another
# Of a token with keys of its own: no other token of a prompt loads them, so more heads share them.
MAX_CHOSEN_GROUP = 64


def latent_group(num_heads: int, most: int = MAX_LATENT_GROUP) -> int:
    """The number of query heads of one program; it divides `num_heads`."""
    sizes = range(min(most, num_heads), 0, -1)
    return next(size for size in sizes if num_heads % size == 0)
