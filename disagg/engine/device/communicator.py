"""The communicator on torch.distributed: gloo between CPUs, NCCL between GPUs.

It does not use the process's default group, since a process may hold several workers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from socket import socket
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional

from disagg.kvtransfer.ucx import interface_of
from disagg.models.share import Share
from disagg.rank_messages import LOOPBACK

_dist: Any = torch.distributed  # its classes are not typed
TCP = "tcp:"  # prefix of the meeting place of ranks on several nodes
MEETING_TIMEOUT_S = 600.0  # one rank may take so much longer to load than another


class TorchCommunicator:
    """Implements `models.communicator.Communicator`. Create one on every rank at the same time.

    Args:
        device_type: "cpu" or "cuda", for all ranks. The current GPU is this rank's.
        meeting_place: path of a file that does not exist yet, through which the ranks find each
            other; on several nodes tcp:HOST:PORT of the first rank.
        host: an address of this node at which the other ranks reach it. gloo listens only there,
            because it has no authentication.
        listener: the first rank's socket, which listens at a tcp: meeting place.

    Raises:
        RuntimeError: the other ranks did not connect in time.
    """

    def __init__(
        self,
        share: Share,
        device_type: str,
        meeting_place: str,
        host: str = LOOPBACK,
        listener: socket | None = None,
    ) -> None:
        self._share = share
        self._store = store = _store(meeting_place, share, listener)
        store.set_timeout(timedelta(seconds=MEETING_TIMEOUT_S))
        self._host, self._is_cpu = host, device_type == "cpu"
        self._group = _group(store, share, device_type, host)
        self._beside: Any = None  # a gloo group between ranks with GPUs, once it is needed
        self._sum = _in_order(_dist.AllreduceOptions())
        self._most = _dist.AllreduceOptions()
        self._most.reduceOp = _dist.ReduceOp.MAX
        self._to_first = _in_order(_dist.GatherOptions())
        self._from_first = _in_order(_dist.BroadcastOptions())
        self._to_first.rootRank = self._from_first.rootRank = 0

    @property
    def share(self) -> Share:
        return self._share

    def all_reduce_(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "gloo sums memory in order, so the tensor must be contiguous"
        if x.numel():
            _wait(self._group.allreduce([x], self._sum))
        return x

    def largest_(self, x: Tensor) -> Tensor:
        # With gloo, also between GPUs, because NCCL would wait for ever for a rank that is gone.
        if self._beside is None and not self._is_cpu:
            store = _dist.PrefixStore("cpu", self._store)
            self._beside = _group(store, self._share, "cpu", self._host)
        own = x.cpu()
        _wait((self._beside or self._group).allreduce([own], self._most))
        return x.copy_(own)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        is_first = self._share.is_first
        if not x.shape[0]:  # there is nothing to join, but the ranks must stay in step
            self.all_reduce_(x.new_zeros(1))
            return x.new_empty(0, sum(widths)) if is_first else x
        # All ranks must send the same number of columns, but parts of a vocabulary differ by one.
        own = functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths] if is_first else []
        _wait(self._group.gather([parts] if parts else [], [own], self._to_first))
        if not parts:
            return x
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def broadcast_(self, x: Tensor) -> Tensor:
        _wait(self._group.broadcast([x], self._from_first))
        return x


def _in_order(options: Any) -> Any:
    """Let NCCL compute on the current stream, in order with the other kernels.

    On a separate stream, the memory of each message would stay allocated until a graph is captured
    completely.
    """
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    if work is not None:  # gloo returns work; NCCL's is ordered by the stream
        work.wait()


def _store(meeting_place: str, share: Share, listener: socket | None) -> Any:
    if not meeting_place.startswith(TCP):
        return _dist.FileStore(meeting_place, share.num_ranks)
    host, _, port = meeting_place.removeprefix(TCP).rpartition(":")
    return _dist.TCPStore(
        host,
        int(port),
        share.num_ranks,
        listener is not None,
        timedelta(seconds=MEETING_TIMEOUT_S),
        wait_for_workers=False,
        # Without a listener torch would listen on all addresses.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _group(store: Any, share: Share, device_type: str, host: str) -> Any:
    if device_type == "cuda":
        name = interface_of(host)
        if host != LOOPBACK and name is not None:  # "=" excludes interfaces with a longer name
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        return _dist.ProcessGroupNCCL(
            store, share.rank, share.num_ranks, _dist.ProcessGroupNCCL.Options()
        )
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    return _dist.ProcessGroupGloo(store, share.rank, share.num_ranks, options)
