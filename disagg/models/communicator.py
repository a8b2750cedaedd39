"""The operations between the ranks of a worker while they compute a step."""

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
        """The number of this rank, and how many ranks there are."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x`, which must be contiguous, by its sum over all ranks; it is equal on all."""
        ...

    def largest_(self, x: Tensor) -> Tensor:
        """Replace each value of `x` by the largest one of all ranks.

        For use during the start: if a rank fails while it loads, this raises, also between GPUs.
        """
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Join the columns of all ranks: [num_rows, sum(widths)] on the first rank.

        Other ranks get back `x`, [num_rows, widths[rank]]. On the first rank the call ends after
        all earlier work of the others, even if there are no rows.
        """
        ...

    def broadcast_(self, x: Tensor) -> Tensor:
        """Replace `x` by the first rank's tensor."""
        ...
