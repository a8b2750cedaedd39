"""The interface through which the first rank of a worker controls the other ranks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from disagg.adapters import Adapter
from disagg.models.communicator import Communicator
from disagg.rank_messages import RankWork


class Followers(Protocol):
    """The other ranks of a worker.

    If a rank is gone, each method raises `StartupError` during the start, and any error later.
    """

    def meet(self, device_type: str) -> Communicator:
        """Wait until all ranks have started, and connect them. device_type: "cpu" or "cuda"."""
        ...

    def least_room_nbytes(self, own_nbytes: int | None) -> int | None:
        """Wait until all ranks have loaded. Returns the smallest memory for KV of any rank."""
        ...

    def raise_lost(self) -> None:
        """Raise the error of a rank that could not load, if one arrives within seconds."""
        ...

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        """Wait until all ranks have so many KV blocks and can compute steps.

        Args:
            max_num_seqs: most sequences of a step.
        """
        ...

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        """Have all other ranks read a LoRA adapter into host memory; the result is when all have.

        It is reported while the worker polls its tasks. The error is `Unavailable`.
        """
        ...

    def forget_adapter(self, digest: str) -> None:
        """Have them free their host memory of an adapter."""
        ...

    def follow(self, work: RankWork) -> None:
        """Have all other ranks do the work that this rank does now, after all earlier work."""
        ...
