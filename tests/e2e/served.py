"""`disagg serve` as a real process with everything under it, for end-to-end tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from disagg.cli.ports import free_port
from tests import plain_http
from tests.e2e.command import is_named

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 150.0  # it gives itself 80 after the first signal
LEFT_TIMEOUT_S = 60.0  # for its processes to end after it


class Served:
    """A running `disagg serve`."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def family(self) -> list[psutil.Process]:
        """What it has started; nothing once it has ended."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def named(self, name: str) -> list[psutil.Process]:
        """Its processes of this name, or with these words in their title."""
        return [each for each in self.family() if is_named(each, name)]

    def workers(self, role: str) -> list[psutil.Process]:
        """The worker processes of a role, by the title that Ray gives them."""
        marks = ("ServeReplica", f"-{role}")
        return [p for p in self.family() if all(m in " ".join(_title(p)) for m in marks)]


def _title(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def served(
    arguments: list[str],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Served]:
    """Start `disagg serve` with `arguments`, wait for its ready line, stop it with SIGINT.

    Nothing that it started may be left: that is asserted.

    Args:
        directory: for its log.
    """
    port = free_port() if port is None else port
    log = directory / "serve.log"
    own = f"--port {port} --log-format text --log-dir {directory}/logs".split()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "disagg.cli.main", "serve", *arguments, *own],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        running = Served(process, port, log)
        family: list[psutil.Process] = []
        try:
            _wait_for_ready_line(running)
            yield running
        finally:
            family = running.family()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            finally:
                process.kill()
                _, left = psutil.wait_procs(family, timeout=LEFT_TIMEOUT_S)
                for each in left:
                    each.kill()
    assert process.returncode == 0, log.read_text()
    assert not left, f"still running after disagg serve ended: {[_title(p) for p in left]}"


def _wait_for_ready_line(running: Served) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "ready after" not in running.log.read_text():
        assert running.process.poll() is None, running.log.read_text()
        assert time.monotonic() < deadline, running.log.read_text()
        time.sleep(0.2)
    assert plain_http.get(f"{running.url}/ready").status_code == 200
