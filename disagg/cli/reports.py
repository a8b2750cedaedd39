"""Messages between the command and the server process: the order to start, and reports back."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec

from disagg.config import ServeConfig
from disagg.messages import StartPhase, StartStep

STOP = b"stop\n"  # the one thing that is said to a process that serves


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and where; secrets are in it, so it goes through a pipe."""

    config: ServeConfig
    raw_config: dict[str, Any]  # the same, with nothing in it that was not asked for
    directory: str  # of the run; removed when it ends
    log_directory: str
    ray_address: str | None
    haproxy: bool


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A part of the start begins.

    limit_s: after which the start is over, for the reason `too_late`; 0: never.
    may_stand_still: whether it is right that nothing of ours computes for long.
    pool_sizes: workers of each pool, where these start.
    """

    name: str
    limit_s: float = 0.0
    too_late: str = ""
    may_stand_still: bool = True
    pool_sizes: dict[str, int] = {}


class Progress(msgspec.Struct, frozen=True, tag=True):
    pools: dict[str, dict[str, dict[StartPhase, StartStep]]]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """`body` is that of `GET /ready`."""

    url: str
    body: dict[str, Any]


class Happened(msgspec.Struct, frozen=True, tag=True):
    """A line for people."""

    event: str
    message: str
    fields: dict[str, Any] = {}


class StartRefused(msgspec.Struct, frozen=True, tag=True):
    """It cannot be served; nothing was."""

    message: str
    param: str | None = None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """What serves has ended by itself."""

    message: str


class DrainEnded(msgspec.Struct, frozen=True, tag=True):
    num_ended: int
    num_cut: int


Report = Phase | Progress | Ready | Happened | StartRefused | Broken | DrainEnded

_decoder = msgspec.json.Decoder(Report)


def read_report(line: bytes) -> Report:
    report: Report = _decoder.decode(line)
    return report


class Reports:
    """Writes reports to a pipe, from any thread; a reader that is gone is not missed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        line = msgspec.json.encode(report) + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                return

    def say(self, event: str, message: str, **fields: Any) -> None:
        self.send(Happened(event, message, fields))
