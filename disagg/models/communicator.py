"""What a rank of a worker asks of the others while it computes a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from disagg.models.share import Share


class Communicator(Protocol):
    """Every rank calls the same methods in the same order, with tensors of the same shapes.

    A call raises if another rank is gone.
    """

    @property
    def share(self) -> Share:
        """Which rank this is, and how many there are."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x`, which is contiguous, by its sum over all ranks, the same on each of them."""
        ...

    def largest_(self, x: Tensor) -> Tensor:
        """Replace `x` by its largest over all ranks. For a start: a rank may fail while it loads,
        and then this raises, between GPUs too."""
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Join the columns of all ranks: [num_rows, sum(widths)] on the first rank.

        Others get back `x`, [num_rows, widths[rank]]. On the first rank the call ends after the
        work that the others were given before, also if there are no rows.
        """
        ...

    def broadcast_(self, x: Tensor) -> Tensor:
        """Replace `x` by that of the first rank."""
        ...
