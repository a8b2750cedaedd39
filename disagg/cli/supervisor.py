"""The parent process of `disagg serve`: handles signals, prints lines, cleans up at the end, and
starts a server again that broke after it was ready.

It imports nothing that could delay the handling of a signal by more than milliseconds, in
particular not Ray.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec
import psutil
from msgspec.structs import replace

from disagg.app.haproxy import HAProxyWatch
from disagg.app.haproxy_launcher import END_SOFTLY
from disagg.cli import process_tree
from disagg.cli.lines import Lines
from disagg.cli.reports import READY, STOP, Failed, Happened, Order, Phase, Report, read_report
from disagg.errors import StartupError

LOOK_PERIOD_S = 0.2
STANDSTILL_PERIOD_S = 1.0
LEAVE_TIMEOUT_S = 15.0  # to remove the application from a cluster that keeps running
END_TIMEOUT_S = 20.0  # for Serve and Ray to stop after the last stream has ended
SERVED_S = 60.0  # a server that broke sooner is started again after a pause
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
SAME_SIGNAL_S = 1.0  # a shell or `docker stop` may deliver one signal twice, to process and group
NUM_STARTS = 3  # failed starts in a row after which the command gives up
BROKEN = 1  # exit status
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Counts the signals that ask the command to stop, from its construction on.

    One that follows the first within `SAME_SIGNAL_S` does not count.
    """

    def __init__(self) -> None:
        self.num = 0
        self._first_s = -math.inf
        self.last = 0
        for number in STOP_SIGNALS:
            # nohup sets SIGHUP to be ignored, and it stays so. A shell sets SIGINT to be ignored
            # for background jobs, but a SIGINT that somebody sends on purpose must count.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._first_s < SAME_SIGNAL_S:
            return
        if not self.num:
            self._first_s = now_s
        self.num += 1
        self.last = number


class Ended(NamedTuple):
    """How a server has ended."""

    status: int
    served_s: float | None  # how long it was ready; None if it never was


class Supervisor:
    """Runs the server process once.

    HAProxy outlives a server that broke: it answers 503 with `Retry-After` until the next one is
    ready.

    Args:
        order: tells the server process what to serve.
    """

    def __init__(self, order: Order, lines: Lines, signals: Signals) -> None:
        self._order = order
        self._lines = lines
        self._signals = signals
        self._phase = Phase("checking")
        self._phase_ends_s = 0.0
        self._standstill: process_tree.Standstill | None = None  # None: the phase may stand still
        self._next_standstill_s = 0.0
        self._ends_by_s = 0.0  # deadline, set when the server process is told to stop
        self._failed: Failed | None = None
        self._proxies: list[psutil.Process] = []  # HAProxy of the server before
        self._ready_at_s: float | None = None

    def run(self) -> Ended:
        """Run the server process until it has ended and all its children are gone.

        Returns:
            With status 0 after a stop, 1 after a failure, 128 plus the signal's number after a
            second signal.

        Raises:
            StartupError: the server process refused to start; it has its message.
        """
        process_tree.adopt_orphans()
        process_tree.set_logs_aside(Path(self._order.log_directory))
        self._proxies = [each for each in process_tree.family() if process_tree.is_haproxy(each)]
        is_restart = bool(self._proxies)
        self._order = replace(self._order, is_restart=is_restart, began_s=time.monotonic())
        directory = Path(self._order.directory)
        try:
            returncode, served_s = self._run_process()
        finally:
            process_tree.keep_logs(directory, Path(self._order.log_directory))
            for each in ("h", "ray", "redis"):
                shutil.rmtree(directory / each, ignore_errors=True)
        if self._failed is not None and self._failed.is_refusal:
            raise StartupError(self._failed.message, param=self._failed.param)
        return Ended(self._status(returncode), served_s)

    def _run_process(self) -> tuple[int, float | None]:
        """The server process's own status, and how long it was ready."""
        read, write = os.pipe()
        with (Path(self._order.log_directory) / "server.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "disagg.cli.server_process", str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write],
                env={**os.environ, process_tree.MARK: self._order.directory},
                start_new_session=True,  # so that Ctrl-C reaches only this process
            )
        os.close(write)
        served_s = None
        try:
            _send(process, msgspec.json.encode(self._order) + b"\n")
            for report in self._reports(process, read):
                self._take(report)
            if self._ready_at_s is not None:
                served_s = time.monotonic() - self._ready_at_s
        finally:
            if process.poll() is None:
                process.kill()
            is_stopped = bool(self._signals.num)
            for left in process_tree.end_family(
                keeps=lambda process: not is_stopped and process_tree.is_haproxy(process)
            ):
                self._lines.say(
                    "left", f"Process {left.pid} did not end after SIGKILL.", pid=left.pid
                )
            if not is_stopped and self._ready_at_s is not None:
                self._keep_listening()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            os.close(read)
        return process.returncode, served_s

    def _keep_listening(self) -> None:
        """Start a stand-in for HAProxy if that has ended with the server: an actor of Ray that
        notices the end of its raylet before we do kills its children."""
        directory = Path(self._order.directory) / "h"
        with contextlib.suppress(OSError, StartupError):
            HAProxyWatch(directory, self._order.config.http.host, self._lines.say).look()

    def _reports(self, process: subprocess.Popen[bytes], descriptor: int) -> Iterator[Report]:
        """The server process's reports, until it closes the pipe or its time is over."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not self._is_over(process):
                if selector.select(LOOK_PERIOD_S):
                    piece = os.read(descriptor, 1 << 16)
                    *lines, buffer = (buffer + piece).split(b"\n")
                    yield from map(read_report, lines)
                    if not piece:
                        # Otherwise it may be killed before it has its status.
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(END_TIMEOUT_S)
                        return
                process_tree.reap(besides=process.pid)

    def _is_over(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether to stop reading reports. Also passes signals on to the server process."""
        now_s = time.monotonic()
        if self._failed is not None:
            return True
        if self._phase.limit_s and now_s > self._phase_ends_s:
            self._failed = Failed(self._phase.too_late)
            return True
        if self._stands_still(now_s):
            self._failed = Failed(
                f"{self._phase.name[0].upper()}{self._phase.name[1:]} came to a standstill: none of"
                f" its processes has used the CPU for {process_tree.STILL_S:.0f} s. Check whether"
                " they are suspended or a disk does not respond; their last output is in"
                f" {self._order.log_directory}."
            )
            return True
        if self._signals.num == 0:
            return False
        if self._signals.num > 1 or (self._ends_by_s and now_s > self._ends_by_s):
            return True
        if not self._ends_by_s:
            return self._begin_stop(process, now_s)
        return False

    def _stands_still(self, now_s: float) -> bool:
        if self._standstill is None or now_s < self._next_standstill_s or self._signals.num:
            return False
        self._next_standstill_s = now_s + STANDSTILL_PERIOD_S
        return self._standstill.is_there(now_s)

    def _begin_stop(self, process: subprocess.Popen[bytes], now_s: float) -> bool:
        """React to the first signal. Returns True if there is nothing to wait for."""
        name = signal.Signals(self._signals.last).name
        if self._ready_at_s is None:
            self._lines.say(
                "stopping", f"{name}: stopping before the server is ready.", signal=name
            )
            if self._order.ray_address is None:
                return True
            self._ends_by_s = now_s + LEAVE_TIMEOUT_S
        else:
            drain_s = self._order.config.drain_s
            self._lines.say(
                "stopping",
                f"{name}: new requests are refused; running ones have {drain_s:g} s to finish"
                " (send the signal again to stop at once).",
                signal=name,
            )
            self._ends_by_s = now_s + drain_s + END_TIMEOUT_S
        _send(process, STOP)
        return False

    def _take(self, report: Report) -> None:
        match report:
            case Phase():
                self._phase = report
                self._phase_ends_s = time.monotonic() + report.limit_s
                self._standstill = None if report.may_stand_still else process_tree.Standstill()
                self._lines.say("phase", report.name)
            case Happened():
                if report.event == READY:
                    self._ready_at_s = time.monotonic()
                    for proxy in self._proxies:
                        with contextlib.suppress(psutil.Error):
                            proxy.send_signal(END_SOFTLY)
                self._lines.say(report.event, report.message, **report.fields)
            case Failed():
                self._failed = report

    def _status(self, returncode: int) -> int:
        """Print how the run ended, after it has; returns the exit status."""
        if self._signals.num > 1:
            self._lines.say("stopped", "Stopped at once because of a second signal.")
            return 128 + self._signals.last
        if self._failed is None and self._signals.num:
            self._lines.say("stopped", "Stopped.")
            return 0
        how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
        ended = Failed(
            f"The server process ended unexpectedly ({how}); its output is in"
            f" {self._order.log_directory}/server.log."
        )
        self._lines.say("broken", (self._failed or ended).message)
        return BROKEN


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended, which is noticed elsewhere
        process.stdin.write(message)
        process.stdin.flush()


def keep_serving(
    serve_once: Callable[[], Ended],
    lines: Lines,
    is_stopped: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run servers one after another until one is stopped or cannot be started.

    The first start is not repeated: if it fails, the cause is rarely temporary.

    Returns:
        The exit status of the last server.

    Raises:
        StartupError: the first start was refused, or the last of `NUM_STARTS`.
    """
    has_served, num_failed, pause_s = False, 0, 0.0
    while True:
        try:
            status, served_s = serve_once()
        except StartupError as error:
            if not has_served or num_failed + 1 == NUM_STARTS or is_stopped():
                raise
            lines.say("start_failed", f"The server did not start: {error.message}")
            status, served_s = BROKEN, None
        if status != BROKEN or is_stopped():
            return status
        has_served = has_served or served_s is not None
        num_failed = num_failed + 1 if served_s is None else 0
        if not has_served or num_failed == NUM_STARTS:
            return status
        if served_s is not None and served_s >= SERVED_S:
            pause_s = 0.0
        when = f" in {pause_s:.0f} s" if pause_s else ""
        lines.say("restarting", f"Starting the server again{when}.")
        for _ in range(round(pause_s / LOOK_PERIOD_S)):
            sleep(LOOK_PERIOD_S)
            if is_stopped():
                lines.say("stopped", "Stopped.")
                return 0
        pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
