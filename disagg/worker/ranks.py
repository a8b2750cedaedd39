"""The ranks of a worker but the first: child processes of it, and the pipes to them.

They live and die with the worker. They are not actors of their own, because Ray then counts,
places and ends the whole worker as one: a replica with as many GPUs as ranks, all of one machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import TYPE_CHECKING, TypeVar

import disagg
from disagg.blocks import BlockHash
from disagg.config import ServeConfig, TierConfig
from disagg.engine.engine_thread import engine_failed
from disagg.errors import DisaggError, StartupError, WorkerLost
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone
from disagg.models.share import Share
from disagg.rank_messages import (
    ConnectPeer,
    ForgetPeer,
    PullBlocks,
    RankCache,
    RankCopied,
    RankCopies,
    RankFailed,
    RankFetch,
    RankFetched,
    RankLoaded,
    RankPulled,
    RankPut,
    RankReady,
    RankStart,
    RankStored,
    RankTask,
    RankUp,
    RankWork,
    ToRank,
    decode_from_rank,
    encode,
)

if TYPE_CHECKING:  # needs torch
    from disagg.models.communicator import Communicator

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
END_WAIT_S = 3.0  # between the end of a rank's pipes and that of its process
Answer = TypeVar("Answer", RankUp, RankLoaded, RankReady)


class Rank:
    """Another rank. Implements `kvtransfer.ranked_transport.RankTransport`,
    `store.ranked_copier.RankCopier` and `store.ranked_store.RankStore`.

    Attributes:
        num_damaged: damaged values that it has read from the store, as of its last fetch.
    """

    def __init__(self, start: RankStart) -> None:
        self._name = f"rank {start.rank} of {start.num_ranks}"
        own_control, its_control = socketpair()
        own_steps, its_steps = socketpair()
        self._control = Connection(own_control.detach())
        self._steps = Connection(own_steps.detach())
        fds = its_control.fileno(), its_steps.fileno()
        here = str(Path(disagg.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        with its_control, its_steps:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "disagg.worker.rank", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": str(start.num_threads),
                },
            )
        self._peer: Peer | None = None
        self._pulled: list[tuple[int, PullDone]] = []
        self._num_saved = 0
        self._loaded_s: list[float] = []
        self._put_errors: list[str | None] = []
        self._fetched: list[tuple[int, str | None]] = []
        self.num_damaged = 0
        self._is_gone = False
        self._tell(start)

    @property
    def name(self) -> str:
        return self._name

    def end(self, status: int) -> str:
        """How it ended, for people."""
        return f"{self._name} ended with exit status {status}"

    def answer(self, kind: type[Answer]) -> Answer:
        """Wait for a message of the start.

        Raises:
            StartupError: it failed, or ended; the message names the rank.
        """
        try:
            message = decode_from_rank(self._control.recv_bytes())
        except (EOFError, OSError):
            status = self.process.wait()
            raise StartupError(
                f"{self._name} ended while the worker started, with exit status {status}; its log"
                " has the reason."
            ) from None
        if isinstance(message, kind):
            return message
        why = message.message if isinstance(message, RankFailed) else repr(message)
        raise StartupError(f"{self._name} could not start: {why}")

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        self._tell(RankCache(num_blocks, max_num_seqs))

    def wait_ready(self) -> None:
        self._peer = self.answer(RankReady).peer

    def follow(self, frame: bytes) -> None:
        self._steps.send_bytes(frame)

    @property
    def peer(self) -> Peer:
        assert self._peer is not None, "it is not ready"
        return self._peer

    def add_peer(self, peer: Peer) -> None:
        self._begin(ConnectPeer(peer))

    def forget_peer(self, worker_id: str) -> None:
        self._begin(ForgetPeer(worker_id))

    def pull(self, number: int, ticket: KVTicket, first_block: int, into: list[int]) -> None:
        self._begin(PullBlocks(number, ticket, first_block, into))

    def poll(self) -> list[tuple[int, PullDone]]:
        self._read()
        pulled, self._pulled = self._pulled, []
        return pulled

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._begin(RankCopies(False, [*pairs]))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._begin(RankCopies(True, [*pairs]))

    def take_saved(self) -> int:
        self._read()
        num_saved, self._num_saved = self._num_saved, 0
        return num_saved

    def take_loaded(self) -> list[float]:
        self._read()
        loaded_s, self._loaded_s = self._loaded_s, []
        return loaded_s

    def put(self, blocks: Sequence[tuple[int, BlockHash]], in_host: bool) -> None:
        self._begin(RankPut([*blocks], in_host))

    def take_put(self) -> list[str | None]:
        self._read()
        errors, self._put_errors = self._put_errors, []
        return errors

    def fetch(self, number: int, names: Sequence[BlockHash], into: Sequence[int]) -> None:
        self._begin(RankFetch(number, [*names], [*into]))

    def take_fetched(self) -> list[tuple[int, str | None]]:
        self._read()
        fetched, self._fetched = self._fetched, []
        return fetched

    def wait(self, timeout_s: float) -> bool:
        return not self._is_gone and self._control.poll(timeout_s)

    def close(self) -> None:
        """It ends when its pipes do."""
        self._control.close()
        self._steps.close()

    def _read(self) -> None:
        """Sort the reports that have come."""
        while not self._is_gone and self._control.poll():
            try:
                report = decode_from_rank(self._control.recv_bytes())
            except (EOFError, OSError):
                self._is_gone = True  # `watch` reports that; here it would be one request's error
                return
            match report:
                case RankPulled(number=number, done=done):
                    self._pulled.append((number, done))
                case RankCopied(num_saved=num_saved, loaded_s=loaded_s):
                    self._num_saved += num_saved
                    self._loaded_s += loaded_s
                case RankStored(errors=errors):
                    self._put_errors += errors
                case RankFetched(number=number, error=error, num_damaged=num_damaged):
                    self._fetched.append((number, error))
                    self.num_damaged = num_damaged

    def _begin(self, task: RankTask) -> None:
        # If it has ended, `watch` reports that. An error here would end one request, whose blocks
        # the first rank may be writing to.
        with contextlib.suppress(OSError):
            self._steps.send_bytes(encode(task))

    def _tell(self, message: ToRank) -> None:
        with contextlib.suppress(OSError):  # `answer` reports that it has ended
            self._control.send_bytes(encode(message))


class Ranks:
    """Implements `engine.device.followers.Followers`. Starts the processes at once.

    Args:
        tier: with the settings of the worker's role.

    Attributes:
        num_threads: of torch in each rank, on a CPU.
        may_hang: a step waits for a rank that is gone, as NCCL does; gloo raises.
    """

    def __init__(self, config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int) -> None:
        num_ranks = tier.engine.tensor_parallel_size
        self._share = Share(0, num_ranks)
        num_threads = tier.engine.num_threads or len(os.sched_getaffinity(0))
        self.num_threads = max(1, num_threads // num_ranks)
        self._place = Path(tempfile.mkdtemp(prefix="disagg-ranks-"))
        self.may_hang = False
        self._is_closing = False
        self._lost: Callable[[str], None] | None = None
        starts = [
            RankStart(
                config=config,
                tier=tier,
                rank=rank,
                num_ranks=num_ranks,
                meeting_place=str(self._place / "meeting"),
                num_threads=self.num_threads,
                worker_id=f"{worker_id}.{rank}",
                epoch=epoch,
            )
            for rank in range(1, num_ranks)
        ]
        self.others: list[Rank] = []
        try:
            for start in starts:
                self.others.append(Rank(start))
        except BaseException:
            self.close()
            raise

    def meet(self, device_type: str) -> Communicator:
        from disagg.engine.device.communicator import TorchCommunicator

        self.may_hang = device_type == "cuda"
        for rank in self.others:
            rank.answer(RankUp)
        return TorchCommunicator(self._share, device_type, str(self._place / "meeting"))

    def least_room_nbytes(self, own_nbytes: int | None) -> int | None:
        rooms = [own_nbytes, *(rank.answer(RankLoaded).room_nbytes for rank in self.others)]
        if not self.may_hang:  # gloo has met; NCCL may look there again
            shutil.rmtree(self._place, ignore_errors=True)
        return min((room for room in rooms if room is not None), default=None)

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        for rank in self.others:
            rank.allocate(num_blocks, max_num_seqs)
        for rank in self.others:
            rank.wait_ready()
        if self.may_hang:  # then the warm-up and the capture of graphs would, too
            self.watch(_end_start)

    def follow(self, work: RankWork) -> None:
        frame = encode(work)
        for rank in self.others:
            rank.follow(frame)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` with a sentence, in a thread of its own, if a rank ends before `close`. A
        later call replaces `lost`."""
        is_watched, self._lost = self._lost is not None, lost

        def wait(rank: Rank) -> None:
            status = rank.process.wait()
            if not self._is_closing and self._lost is not None:
                self._lost(rank.end(status))

        for rank in () if is_watched else self.others:
            name = f"watch {rank.name}"
            threading.Thread(target=wait, args=(rank,), name=name, daemon=True).start()

    def diagnose(self, cause: Exception) -> DisaggError:
        """What requests hear of an exception that broke the engine.

        If a rank was killed, their worker is lost, as if its only process had been killed. A rank
        that ends by itself has failed on a step, as an engine does, and so may the next one.
        """
        deadline_s = time.monotonic() + END_WAIT_S
        while True:
            statuses = [rank.process.poll() for rank in self.others]
            for rank, status in zip(self.others, statuses, strict=True):
                if status is not None and status < 0:
                    return WorkerLost(f"The worker has lost a part: {rank.end(status)}.")
            if None not in statuses or time.monotonic() > deadline_s:
                return engine_failed(cause)
            time.sleep(0.01)

    def close(self) -> None:
        """End all other ranks."""
        self._is_closing = True
        for rank in self.others:
            rank.close()
        _wait([rank.process for rank in self.others])
        shutil.rmtree(self._place, ignore_errors=True)


def _end_start(reason: str) -> None:
    log.error("The worker cannot start: %s.", reason)
    os._exit(1)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
