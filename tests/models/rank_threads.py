"""Ranks that are threads of one process, and talk by gloo, as processes do, or by their memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from disagg.engine.device.communicator import TorchCommunicator
from disagg.models.communicator import Communicator
from disagg.models.share import Share

T = TypeVar("T")


class ThreadCommunicator:
    """Implements `Communicator`: threads leave tensors for each other.

    gloo takes 3 ms of processor time for a sum over four ranks that share two cores.
    """

    def __init__(self, share: Share, meeting: threading.Barrier, left: list[Tensor]) -> None:
        self.share = share
        self._meeting, self._left = meeting, left

    def _all(self, x: Tensor) -> list[Tensor]:
        """What each rank brought, in order."""
        self._left[self.share.rank] = x.clone()
        self._meeting.wait()
        found = list(self._left)
        self._meeting.wait()  # nobody leaves the next one before all have seen this one
        return found

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def largest_(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._all(x)).amax(0))

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        parts = self._all(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, 1) if self.share.is_first else x

    def broadcast_(self, x: Tensor) -> Tensor:
        return x.copy_(self._all(x)[0])


def on_ranks(
    num_ranks: int,
    work: Callable[[Communicator], T],
    place: Path | None = None,
    *,
    has_whole_experts: bool = False,
) -> list[T]:
    """What each rank returns, in order.

    Args:
        place: a directory by which ranks that talk by gloo find each other.
    """
    meeting, left = threading.Barrier(num_ranks), [torch.empty(0)] * num_ranks

    def run(rank: int) -> T:
        share = Share(rank, num_ranks, has_whole_experts)
        if place is not None:
            return work(TorchCommunicator(share, "cpu", str(place / "meeting")))
        try:
            return work(ThreadCommunicator(share, meeting, left))
        except BaseException:
            meeting.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))
