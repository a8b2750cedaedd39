"""Finds and ends all processes that a command has started, including grandchildren.

The files of a run are in one directory, whose path is in the environment of all its processes. The
run holds a lock on the directory, which the kernel releases when the process dies in any way. So
the next start finds what a killed run has left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import psutil

from disagg.app.processes import runs

PREFIX = "disagg-"
MARK = "DISAGG_RUN"  # variable with the directory of the run, for all its processes
NUM_LOOKS = 5

STILL_S = 10.0
STILL_WORK = 0.2  # of a processor; a start on a busy machine has 0.8, one that hangs 0.02 to 0.1

_LOCK = "alive"
_PR_SET_CHILD_SUBREAPER = 36


def temporary_directory() -> Path:
    """/tmp whatever TMPDIR says: sockets lie in it, whose paths may have 97 characters only."""
    return Path("/tmp") if os.path.isdir("/tmp") else Path(tempfile.gettempdir())


def new_run() -> tuple[Path, int]:
    """A directory for a run, and the file descriptor whose lock says that the run is alive."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary_directory()))
    # Locked before it has its name: whoever finds the file finds it locked.
    descriptor = os.open(directory / "new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.rename(directory / "new", directory / _LOCK)
    return directory, descriptor


def join_run(directory: Path) -> int:
    """Lock a run's directory from another process of it; returns the file descriptor."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


class EndedProcess(NamedTuple):
    pid: int
    name: str


def end_dead_runs() -> list[EndedProcess]:
    """End what runs of this user have left that were killed."""
    ended: list[EndedProcess] = []
    for directory in temporary_directory().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == os.getuid() and _is_dead(directory):
                ended += end_run(directory)
    return ended


def end_run(directory: Path) -> list[EndedProcess]:
    """Kill the processes of a run, other than this one, and remove its directory.

    Looks until there are none: Ray may start one while others are killed.
    """
    ended = []
    for _ in range(NUM_LOOKS):
        found = _processes_of(directory)
        if not found:
            break
        for process in found:
            with contextlib.suppress(psutil.Error):
                ended.append(EndedProcess(process.pid, process.name()))
                process.kill()
        psutil.wait_procs(list(found), timeout=2)
    shutil.rmtree(directory, ignore_errors=True)
    return ended


def _processes_of(directory: Path) -> set[psutil.Process]:
    """Some of Ray's overwrite their environment with a title: they are children of others."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _is_of(process, directory):
                found |= {process, *process.children(recursive=True)}
    found.discard(psutil.Process())
    return found


def end_run_elsewhere(directory: Path) -> None:
    """`end_run` by a process of its own: Ray ends a process whose raylet is killed, and would leave
    the directory half removed. Returns when it is done, if this process lives so long."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-m", "disagg.cli.process_tree", str(directory)]
    subprocess.run(command, env=environment, start_new_session=True, check=False)


def adopt_orphans() -> None:
    """Let processes whose parents die become children of this one (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def family() -> list[psutil.Process]:
    """All descendants of this process."""
    return psutil.Process().children(recursive=True)


def reap(besides: int | None = None) -> None:
    """Bury children that have ended, adopted ones as well; no more once it is `besides` that has.

    The kernel names them: to look for them among all processes of the machine takes milliseconds,
    and the command does this all the time.
    """
    if sys.platform != "linux":  # nobody is adopted
        return
    with contextlib.suppress(ChildProcessError):  # there is none
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == besides:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_family(timeout_s: float = 2.0) -> list[psutil.Process]:
    """Kill all descendants, also those that are born meanwhile; returns those still there."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = family()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        reap()
        left = [each for each in left if runs(each)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


class Standstill:
    """Tells a start that hangs from one that is slow, by what the family does.

    Work is the time in which its threads computed or waited for a processor, so that a machine
    that is too busy does not look like a start that hangs. Where the system does not say (other
    than Linux), nothing ever stands still.
    """

    def __init__(self) -> None:
        self._work_s: dict[psutil.Process, float] = {}
        self._total_s = 0.0
        self._seen: deque[tuple[float, float]] = deque()  # times, and the work until then

    def is_there(self, now_s: float) -> bool:
        """Whether there was next to no work for `STILL_S`. To be asked about once a second."""
        is_busy = not os.path.exists("/proc/self/schedstat")
        for process in family():
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                is_busy |= process.status() == psutil.STATUS_DISK_SLEEP
                work_s = _work_s(process.pid)
                self._total_s += max(work_s - self._work_s.get(process, 0.0), 0.0)
                self._work_s[process] = work_s
        if is_busy:
            self._seen.clear()
        self._seen.append((now_s, self._total_s))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - STILL_S:
            self._seen.popleft()
        began_s, before_s = self._seen[0]
        passed_s = now_s - began_s
        return passed_s >= STILL_S and self._total_s - before_s < STILL_WORK * passed_s


def _work_s(pid: int) -> float:
    """Of all threads of a process. Raises `OSError`."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            total_ns += int(ran_ns) + int(waited_ns)
    return total_ns / 1e9


def keep_logs(directory: Path, log_directory: Path) -> None:
    """Copy what Ray has written about a run to where it outlives the run."""
    session = directory / "ray" / "session_latest" / "logs"
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(session, log_directory / "ray", symlinks=True, dirs_exist_ok=True)


def _is_dead(directory: Path) -> bool:
    """Whether there was a run, and nobody holds its lock. Raises `OSError`."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_of(process: psutil.Process, directory: Path) -> bool:
    """Whether a run has started a process; not whether somebody reads its files."""
    with contextlib.suppress(psutil.Error, OSError):
        is_mine: bool = process.uids().real == os.getuid()
        return is_mine and process.environ().get(MARK) == str(directory)
    return False


if __name__ == "__main__":
    end_run(Path(sys.argv[1]))
