"""The first rank's interface to another rank of its worker: messages, and the rank's process.

`LocalRank` is a child process that ends with the worker. `RemoteRank` is on another node, where
`RankNodes` has started it; it ends when its connections to the first rank end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Protocol, TypeVar

import disagg
from disagg.errors import StartupError
from disagg.kvtransfer.ticket import Peer
from disagg.rank_messages import (
    RankDone,
    RankFailed,
    RankLoaded,
    RankReady,
    RankStart,
    RankUp,
    ToRank,
    decode_from_rank,
    encode,
)
from disagg.worker.rank_listener import Address, RankListener, has_message, is_over

STOP_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 120.0  # for a process on another node to start and to connect
LOOK_S = 0.2  # between two checks whether the process has ended instead
Answer = TypeVar("Answer", RankUp, RankLoaded, RankReady)


class Rank(ABC):
    """Another rank. `ranked` uses it for what all ranks do.

    Attributes:
        name: for errors.
        num_damaged: number of damaged values that it has read from the store until its last fetch.
    """

    _control: Connection
    _steps: Connection

    def __init__(self, start: RankStart, place: str = "") -> None:
        self.name = f"rank {start.rank} of {start.num_ranks}{place}"
        self._peer: Peer | None = None
        self._reports: list[RankDone] = []
        self.num_damaged = 0
        self._is_gone = False
        self._failure: str | None = None  # the rank's error message if it failed

    # About the rank's process; each kind of rank implements these.

    @abstractmethod
    def wait_end(self) -> str:
        """Wait until the rank has ended. Returns how, as a sentence without a full stop."""

    @abstractmethod
    def was_killed(self) -> bool | None:
        """Whether the rank was killed or its node is gone; False if it failed; None if it runs.

        Only the thread that reads its messages may call this.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the pipes to the rank, which ends it."""

    @abstractmethod
    def wait_closed(self) -> None:
        """Wait for the end of the rank after `close`; kills it if it does not end."""

    # Messages.

    def answer(self, kind: type[Answer]) -> Answer:
        """Wait for a message of this kind, which the rank sends while it starts.

        Raises:
            StartupError: the rank failed or ended; the message names it.
        """
        try:
            message = decode_from_rank(self._control.recv_bytes())
        except (EOFError, OSError):
            raise StartupError(
                f"{self.wait_end()}, so the worker cannot start; see the rank's log for the reason."
            ) from None
        if isinstance(message, kind):
            return message
        why = message.message if isinstance(message, RankFailed) else repr(message)
        raise StartupError(f"{self.name} cannot start: {why}")

    def wait_ready(self) -> None:
        self._peer = self.answer(RankReady).peer

    def follow(self, frame: bytes) -> None:
        self._steps.send_bytes(frame)

    @property
    def peer(self) -> Peer:
        assert self._peer is not None, "the rank is not ready"
        return self._peer

    def tell(self, frame: bytes) -> None:
        """Let the rank begin an encoded task."""
        # If the rank has ended, `watch` reports it. An error here would end one request, to whose
        # blocks the first rank may be writing.
        with contextlib.suppress(OSError):
            self._steps.send_bytes(frame)

    def take_reports(self) -> list[RankDone]:
        """The tasks that ended since the last call."""
        self._read()
        reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> bool:
        """Wait until the rank has a report. Returns False after the timeout or if it is gone."""
        return not self._is_gone and self._control.poll(timeout_s)

    def _read(self) -> None:
        """Read what the rank reports."""
        while not self._is_gone and has_message(self._control):
            try:
                report = decode_from_rank(self._control.recv_bytes())
            except (EOFError, OSError):
                self._is_gone = True  # `watch` reports this; an error here would fail one request
                return
            match report:
                case RankDone():
                    self._reports.append(report)
                    self.num_damaged = max(self.num_damaged, report.num_damaged)
                case RankFailed(message=message):
                    self._failure = message

    def send(self, message: ToRank) -> None:
        with contextlib.suppress(OSError):  # `answer` reports if the rank has ended
            self._control.send_bytes(encode(message))


class LocalRank(Rank):
    """A rank in a child process.

    Attributes:
        process: the child process.
    """

    def __init__(self, start: RankStart) -> None:
        super().__init__(start)
        own_control, child_control = socketpair()
        own_steps, child_steps = socketpair()
        self._control = Connection(own_control.detach())
        self._steps = Connection(own_steps.detach())
        fds = child_control.fileno(), child_steps.fileno()
        here = str(Path(disagg.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        with child_control, child_steps:
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
        self.send(start)

    def wait_end(self) -> str:
        return f"{self.name} ended with exit status {self.process.wait()}"

    def was_killed(self) -> bool | None:
        status = self.process.poll()
        return None if status is None else status < 0

    def close(self) -> None:
        self._control.close()
        self._steps.close()

    def wait_closed(self) -> None:
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RemoteProcess(Protocol):
    """The process of a rank on another node."""

    def ended(self, timeout_s: float) -> str | None:
        """How the process ended, as text; None if it still runs."""
        ...

    def kill(self) -> None: ...


class RankNodes(Protocol):
    """The nodes of a worker with several nodes.

    hosts: addresses by which the nodes reach each other; the first one is this node's.
    """

    @property
    def hosts(self) -> Sequence[str]: ...

    def launch(self, node: int, start: RankStart, listener: Address) -> RemoteProcess:
        """Start a process on `hosts[node]` that calls `rank.run_elsewhere`, without waiting."""
        ...


class RemoteRank(Rank):
    """A rank on another node.

    Args:
        node: index of its node in `nodes`.
        listener: accepts its connections.
    """

    def __init__(
        self, start: RankStart, nodes: RankNodes, node: int, listener: RankListener
    ) -> None:
        super().__init__(start, f" on {nodes.hosts[node]}")
        self._number, self._listener = start.rank, listener
        self._process = nodes.launch(node, start, listener.address)
        self._is_connected = False

    def answer(self, kind: type[Answer]) -> Answer:
        if not self._is_connected:
            self._control, self._steps = self._connections()
            self._is_connected = True
        return super().answer(kind)

    def _connections(self) -> tuple[Connection, Connection]:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while (found := self._listener.take(self._number, LOOK_S)) is None:
            why = self._process.ended(0.0)
            if why is not None:
                raise StartupError(f"{self.name} cannot start: {why}")
            if time.monotonic() > deadline:
                host, port = self._listener.address
                raise StartupError(
                    f"{self.name} did not connect to {host}:{port} within {CONNECT_TIMEOUT_S:.0f}"
                    " s; the nodes of a worker must reach each other on all ports, so check"
                    " firewalls.",
                    param="nnodes",
                )
        return found

    def wait_end(self) -> str:
        is_over(self._control, None)
        return f"{self.name} is gone"

    def was_killed(self) -> bool | None:
        if not is_over(self._control):
            return None
        self._read()
        return self._failure is None

    def close(self) -> None:
        if self._is_connected:
            self._control.close()
            self._steps.close()

    def wait_closed(self) -> None:
        if not self._is_connected or self._process.ended(STOP_TIMEOUT_S) is None:
            self._process.kill()
