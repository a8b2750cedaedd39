"""Messages between the command and the server process: the order to start, and reports back."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec

from disagg.config import ServeConfig

STOP = b"stop\n"  # the only message to the server process after its order


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and where. It goes through a pipe, because it contains secrets."""

    config: ServeConfig
    raw_config: dict[str, Any]  # the same without defaults; see `serve_config.Layers`
    directory: str  # the run's directory, removed when the run ends
    log_directory: str
    ray_address: str | None
    haproxy: bool
    replace: bool = False
    is_restart: bool = False  # HAProxy of the server before listens on the port
    began_s: float = 0.0  # when the start began, on the steady clock of the machine


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A phase of the start begins.

    limit_s: time after which the start fails with the message `too_late`; 0: no limit.
    may_stand_still: whether the run's processes may be idle for long in this phase.
    """

    name: str
    limit_s: float = 0.0
    too_late: str = ""
    may_stand_still: bool = True


class Happened(msgspec.Struct, frozen=True, tag=True):
    """An event to print, with a sentence for people. `READY` begins the time of serving."""

    event: str
    message: str
    fields: dict[str, Any] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last report: the start was refused before anything was served, or the server broke."""

    message: str
    param: str | None = None
    is_refusal: bool = True


READY = "ready"

Report = Phase | Happened | Failed

_decoder = msgspec.json.Decoder(Report)


def read_report(line: bytes) -> Report:
    report: Report = _decoder.decode(line)
    return report


class Reports:
    """Writes reports to a pipe, from any thread. Ignores a closed pipe."""

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
