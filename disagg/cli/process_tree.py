"""Finds and ends all processes that a command has started, including grandchildren.

The files of a run are in one directory, whose path is in the environment of all its processes. The
run holds a lock on the directory, which the kernel releases when the process dies in any way. So
the next start can find what a killed run has left behind.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from disagg.app import haproxy_launcher
from disagg.app.probe import runs
from disagg.errors import StartupError

PREFIX = "disagg-"
MARK = "DISAGG_RUN"  # environment variable with the run's directory, set for all its processes
NUM_LOOKS = 5

STILL_S = 10.0
# Share of a CPU core. A start on a busy machine uses 0.8, a start that hangs 0.02 to 0.1.
STILL_WORK = 0.2
IDLE_PERCENT = 50.0  # a machine whose CPUs are idle for less of the time is busy

_LOCK = "alive"
_PR_SET_CHILD_SUBREAPER = 36


def temporary_directory() -> Path:
    """Always /tmp, whatever TMPDIR is: the path of a socket may have 97 characters at most."""
    return Path("/tmp") if os.path.isdir("/tmp") else Path(tempfile.gettempdir())


def new_run() -> tuple[Path, int]:
    """Make a run's directory. Also returns the file descriptor of its lock; keep it open.

    Raises:
        StartupError: it cannot be made.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary_directory()))
        # The lock is taken before the file gets its name, so nobody can find it unlocked.
        descriptor = os.open(directory / "new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.rename(directory / "new", directory / _LOCK)
    except OSError as error:
        raise StartupError(
            f"Cannot write to {temporary_directory()} ({error.strerror}). The sockets of the server"
            " are created there; free some space or make it writable."
        ) from error
    return directory, descriptor


def join_run(directory: Path) -> int:
    """Lock a run's directory from another process of the run; returns the file descriptor."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


class EndedProcess(NamedTuple):
    pid: int
    name: str


def end_dead_runs() -> list[EndedProcess]:
    """End the processes that killed runs of this user have left behind."""
    ended: list[EndedProcess] = []
    for directory in temporary_directory().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == os.getuid() and _is_dead(directory):
                ended += end_run(directory)
    return ended


def end_run(directory: Path) -> list[EndedProcess]:
    """Kill all processes of a run except this one, and remove its directory.

    It looks several times, because Ray may start processes while others are killed. Python's
    resource trackers are killed at the last look only: when all that they work for have ended, they
    remove the semaphores that these have left in /dev/shm, and end.
    """
    ended = []
    for look in range(NUM_LOOKS):
        found = _processes_of(directory)
        if not found:
            break
        for process in found:
            with contextlib.suppress(psutil.Error):
                if look < NUM_LOOKS - 1 and _is_resource_tracker(process):
                    continue
                ended.append(EndedProcess(process.pid, process.name()))
                process.kill()
        psutil.wait_procs(list(found), timeout=2)
    shutil.rmtree(directory, ignore_errors=True)
    return ended


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Raises `psutil.Error`."""
    return any("multiprocessing.resource_tracker" in each for each in process.cmdline())


def _processes_of(directory: Path) -> set[psutil.Process]:
    """The processes of a run, found by their environment or as children of such processes.

    Some of Ray's processes overwrite their environment with a title.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _is_of(process, directory):
                found |= {process, *process.children(recursive=True)}
    found.discard(psutil.Process())
    return found


def end_run_elsewhere(directory: Path) -> None:
    """Call `end_run` in a new process, and wait for it.

    Ray ends this process once its raylet is killed, which would leave the directory half removed.
    """
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


def is_haproxy(process: psutil.Process) -> bool:
    """Whether it is HAProxy, or its launcher, which becomes HAProxy and tells the one before it to
    stop listening."""
    with contextlib.suppress(psutil.Error):
        # In this order: it may become HAProxy between the two looks.
        return haproxy_launcher.__file__ in process.cmdline() or process.name() == "haproxy"
    return False


def reap(besides: int | None = None) -> None:
    """Reap children that have ended, including adopted ones. Stops at the child `besides`.

    It asks the kernel which children have ended. Looking through all processes of the machine
    would take milliseconds, and the command does this all the time.
    """
    if sys.platform != "linux":  # there are no adopted children
        return
    with contextlib.suppress(ChildProcessError):  # there are no children
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == besides:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_family(
    timeout_s: float = 2.0, keeps: Callable[[psutil.Process], bool] = lambda process: False
) -> list[psutil.Process]:
    """Kill all descendants, including new ones; returns those that are still there.

    Args:
        keeps: says of a descendant whether it lives on.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = [each for each in family() if not keeps(each)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        reap()
        left = [each for each in left if runs(each)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


class Standstill:
    """Distinguishes a start that hangs from a slow one, by the work of all descendants.

    Work is the time in which threads ran or waited for a CPU. On a busy machine a start may also
    wait for what others do: for a disk, for memory, for a thread whose wait is not counted before
    it ends. So nothing counts as a standstill while the machine is busy. The same holds where work
    is unknown: on systems other than Linux, and on a Linux that does not count it. But a process
    that stays suspended is a standstill always, whatever others do that wait for it.
    """

    def __init__(self) -> None:
        self._suspended_since_s: dict[psutil.Process, float] = {}
        self._work_s: dict[psutil.Process, float] = {}
        self._total_s = 0.0
        self._seen: deque[tuple[float, float]] = deque()  # (time, total work until then)

    def is_there(self, now_s: float) -> bool:
        """Whether there was hardly any work for `STILL_S`. Call it about once a second."""
        states = {}
        for process in family():
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                states[process] = process.status()
                work_s = _work_s(process.pid)
                self._total_s += max(work_s - self._work_s.get(process, 0.0), 0.0)
                self._work_s[process] = work_s
        self._suspended_since_s = {
            process: self._suspended_since_s.get(process, now_s)
            for process, state in states.items()
            if state == psutil.STATUS_STOPPED
        }
        if any(now_s - since_s >= STILL_S for since_s in self._suspended_since_s.values()):
            return True
        is_busy = psutil.cpu_times_percent().idle < IDLE_PERCENT  # since the last look
        if is_busy or psutil.STATUS_DISK_SLEEP in states.values() or not self._total_s:
            self._seen.clear()
        self._seen.append((now_s, self._total_s))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - STILL_S:
            self._seen.popleft()
        began_s, before_s = self._seen[0]
        passed_s = now_s - began_s
        return passed_s >= STILL_S and self._total_s - before_s < STILL_WORK * passed_s


def _work_s(pid: int) -> float:
    """Total run and wait time of all threads of a process, in seconds. Raises `OSError`."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            total_ns += int(ran_ns) + int(waited_ns)
    return total_ns / 1e9


def keep_logs(directory: Path, log_directory: Path) -> None:
    """Copy Ray's logs of a run to the log directory, which is kept after the run."""
    session = directory / "ray" / "session_latest" / "logs"
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(session, log_directory / "ray", symlinks=True, dirs_exist_ok=True)


def set_logs_aside(log_directory: Path) -> None:
    """Keep the copy of Ray's logs from the server before this one, which may show why it broke."""
    shutil.rmtree(log_directory / "ray-before", ignore_errors=True)
    with contextlib.suppress(OSError):
        (log_directory / "ray").rename(log_directory / "ray-before")


def _is_dead(directory: Path) -> bool:
    """Whether no process holds the lock of a run. Raises `OSError` if there was no run."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_of(process: psutil.Process, directory: Path) -> bool:
    """Whether the run with this directory has started the process."""
    with contextlib.suppress(psutil.Error, OSError):
        is_mine: bool = process.uids().real == os.getuid()
        return is_mine and process.environ().get(MARK) == str(directory)
    return False


if __name__ == "__main__":
    end_run(Path(sys.argv[1]))
