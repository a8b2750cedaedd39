"""The other ranks of a worker: child processes of the first rank, or processes on other nodes.

They end with the worker. Ranks on the worker's node are child processes instead of actors, so that
Ray counts, places and ends them together with the worker. Ranks on other nodes are actors in the
worker's placement group (`app/rank_actors.py`), and connect to a listener (`rank_listener`).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

import msgspec

from disagg.adapters import Adapter
from disagg.config import ServeConfig, TierConfig
from disagg.engine.device.choices import choose_device, choose_dtype
from disagg.engine.engine_thread import engine_failed
from disagg.errors import DisaggError, StartupError, Unavailable, WorkerLost
from disagg.host import usable_cores
from disagg.models.description import describe_model
from disagg.rank_messages import (
    LOOPBACK,
    ForgetAdapter,
    RankAdapter,
    RankCache,
    RankDone,
    RankLoaded,
    RankStart,
    RankUp,
    RankWork,
    encode,
)
from disagg.worker.other_rank import LocalRank, Rank, RankNodes, RemoteRank
from disagg.worker.rank_listener import RankListener, listen
from disagg.worker.ranked import RankTasks, first_error

if TYPE_CHECKING:  # needs torch
    from disagg.models.communicator import Communicator

log = logging.getLogger(__name__)

END_WAIT_S = 3.0  # between the end of a rank's pipes and the end of its process
LOOK_S = 0.01


class Ranks:
    """Starts the processes of the other ranks. Implements `engine.device.followers.Followers`.

    Args:
        tier: the tier with the settings of the worker's role.
        nodes: the nodes of the worker, if it has several.

    Attributes:
        tasks: those that all ranks carry out.
        num_threads: number of torch threads in each rank, on a CPU.
        may_hang: whether a step hangs if a rank is gone. With NCCL it does; gloo raises an error,
            except if a whole node is gone.

    Raises:
        StartupError: other nodes cannot reach this node.
    """

    def __init__(
        self,
        config: ServeConfig,
        tier: TierConfig,
        worker_id: str,
        epoch: int,
        nodes: RankNodes | None = None,
    ) -> None:
        num_ranks, num_here = tier.engine.tensor_parallel_size, tier.engine.ranks_per_node
        num_threads = tier.engine.num_threads or usable_cores()
        self.num_threads = max(1, num_threads // num_here)
        self._share, self._nodes = tier.engine.share(), nodes
        self._place = Path(tempfile.mkdtemp(prefix="disagg-ranks-"))
        self.may_hang = False
        self._is_closing = False
        self._lost: Callable[[str], None] | None = None
        self._meeting = str(self._place / "meeting")
        self._meeting_listener: socket | None = None
        self._listener: RankListener | None = None
        self._host = LOOPBACK
        self.others: list[Rank] = []
        try:
            if nodes is not None:
                self._host, tier = nodes.hosts[0], _settled(tier)
                self._meeting_listener = listen(self._host)
                self._meeting = f"tcp:{self._host}:{self._meeting_listener.getsockname()[1]}"
                self._listener = RankListener(self._host, config.cluster_key.encode(), worker_id)
            for rank in range(1, num_ranks):
                start = RankStart(
                    config=config,
                    tier=tier,
                    rank=rank,
                    num_ranks=num_ranks,
                    meeting_place=self._meeting,
                    host=self._host,
                    num_threads=self.num_threads,
                    worker_id=worker_id,
                    epoch=epoch,
                )
                self.others.append(self._started(start, rank // num_here))
        except BaseException:
            self.close()
            raise
        self.tasks = RankTasks(self.others)

    def _started(self, start: RankStart, node: int) -> Rank:
        if not node:
            return LocalRank(start)
        assert self._nodes is not None and self._listener is not None
        host = self._nodes.hosts[node]
        config = msgspec.structs.replace(start.config, link_host=host)
        start = msgspec.structs.replace(start, config=config, host=host)
        return RemoteRank(start, self._nodes, node, self._listener)

    def meet(self, device_type: str) -> Communicator:
        from disagg.engine.device.communicator import TorchCommunicator

        self.may_hang = device_type == "cuda" or self._nodes is not None
        for rank in self.others:
            rank.answer(RankUp)
        if self._listener is not None:
            self._listener.close()  # all ranks have connected
        listener, self._meeting_listener = self._meeting_listener, None
        return TorchCommunicator(self._share, device_type, self._meeting, self._host, listener)

    def least_room_nbytes(self, own_nbytes: int | None) -> int | None:
        rooms = [own_nbytes, *(rank.answer(RankLoaded).room_nbytes for rank in self.others)]
        if not self.may_hang:  # gloo no longer needs the directory; NCCL may read it again
            shutil.rmtree(self._place, ignore_errors=True)
        return min((room for room in rooms if room is not None), default=None)

    def raise_lost(self) -> None:
        deadline_s = time.monotonic() + END_WAIT_S
        running, waited = [*self.others], None
        while running and time.monotonic() < deadline_s:
            for rank in [each for each in running if each.wait(LOOK_S)]:
                running.remove(rank)
                try:
                    rank.answer(RankLoaded)
                except StartupError as error:
                    # A RuntimeError comes from a communicator that waited for another rank, whose
                    # own error is more useful.
                    if "RuntimeError" not in error.message:
                        raise
                    waited = error
        if waited is not None:
            raise waited

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        for rank in self.others:
            rank.send(RankCache(num_blocks, max_num_seqs))
        for rank in self.others:
            rank.wait_ready()
        if self.may_hang:  # the warm-up and the capture of graphs could hang, too
            self.watch(_end_start)

    def check_layout(self, layout: str) -> None:
        """Refuse ranks with another model or version than the first rank.

        Raises:
            StartupError: a rank differs; the message names it.
        """
        for rank in self.others:
            if rank.peer.layout != layout:
                raise StartupError(
                    f"{rank.name} stores KV as {rank.peer.layout!r}, but the first rank as"
                    f" {layout!r}; install the same model and version of disagg on all nodes."
                )

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        loaded = Future[None]()

        def ended(dones: list[RankDone]) -> None:
            error = first_error(dones)
            if error is None:
                loaded.set_result(None)
            else:
                loaded.set_exception(Unavailable(error))

        self.tasks.tell(RankAdapter(self.tasks.add(ended, num_own=0), adapter))
        return loaded

    def forget_adapter(self, digest: str) -> None:
        self.tasks.tell(ForgetAdapter(digest))

    def follow(self, work: RankWork) -> None:
        frame = encode(work)
        for rank in self.others:
            rank.follow(frame)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` with a sentence, in a separate thread, if a rank ends before `close`.

        A later call of this method replaces `lost`.
        """
        is_watched, self._lost = self._lost is not None, lost

        def wait(rank: Rank) -> None:
            end = rank.wait_end()
            if not self._is_closing and self._lost is not None:
                self._lost(end)

        for rank in () if is_watched else self.others:
            name = f"watch {rank.name}"
            threading.Thread(target=wait, args=(rank,), name=name, daemon=True).start()

    def diagnose(self, cause: Exception) -> DisaggError:
        """The error that requests get after an exception in the engine.

        If a rank was killed, the worker is lost, as if its only process had been killed. If a rank
        failed, a request may be the cause, as with a failed engine.
        """
        deadline_s = time.monotonic() + END_WAIT_S
        while True:
            ends = [rank.was_killed() for rank in self.others]
            for rank, was_killed in zip(self.others, ends, strict=True):
                if was_killed:
                    return WorkerLost(f"The worker has lost a rank: {rank.wait_end()}.")
            if None not in ends or time.monotonic() > deadline_s:
                return engine_failed(cause)
            time.sleep(0.01)

    def close(self) -> None:
        """End all other ranks."""
        self._is_closing = True
        for rank in self.others:
            rank.close()
        for each in (self._listener, self._meeting_listener):
            if each is not None:
                each.close()
        for rank in self.others:
            rank.wait_closed()
        shutil.rmtree(self._place, ignore_errors=True)


def _settled(tier: TierConfig) -> TierConfig:
    """The tier with device and dtype chosen on this node, so that all nodes use the same."""
    engine, model = tier.engine, describe_model(tier.directory)
    device = choose_device(engine)
    dtype = choose_dtype(engine, model.config, device)
    engine = msgspec.structs.replace(engine, device=device, dtype=dtype)
    return msgspec.structs.replace(tier, engine=engine)


def _end_start(reason: str) -> None:
    log.error("The worker cannot start: %s.", reason)
    os._exit(1)
