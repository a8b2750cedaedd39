"""Nodes of a worker on this machine, without Ray: other addresses of the loopback."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from disagg.rank_messages import RankStart
from disagg.worker.rank_listener import Address

PROGRAM = """
import sys, msgspec
from disagg.rank_messages import RankStart
from disagg.worker.rank import run_elsewhere

start = msgspec.json.decode(sys.stdin.buffer.read(), type=RankStart)
run_elsewhere(start, (sys.argv[1], int(sys.argv[2])))
"""


class FakeRankProcess:
    """Implements `worker.other_rank.RemoteProcess`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def ended(self, timeout_s: float) -> str | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit status {self.process.wait(timeout_s)}"
        return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class FakeRankNodes:
    """Implements `worker.other_rank.RankNodes`: a process stands for an actor."""

    def __init__(self, num_nodes: int) -> None:
        self.hosts: Sequence[str] = [f"127.0.0.{1 + node}" for node in range(num_nodes)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, node: int, start: RankStart, door: Address) -> FakeRankProcess:
        assert start.host == self.hosts[node]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, door)], stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        self.processes.append(process)
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended
            process.stdin.write(msgspec.json.encode(start))
        return FakeRankProcess(process)


@contextlib.contextmanager
def rank_nodes(num_nodes: int = 2) -> Iterator[FakeRankNodes]:
    nodes = FakeRankNodes(num_nodes)
    yield nodes
    for process in nodes.processes:
        assert process.wait(30) is not None
