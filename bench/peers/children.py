"""Processes of peers: how and why they ended, and the memory of one with all its children."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import psutil

STOP_TIMEOUT_S = 10.0

# A line of a traceback that says what was raised, also where vLLM's log puts words before it.
_RAISED = re.compile(
    r"^(?:\(.*? pid=\d+\) )?(?:ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)"
)


class NotRunning(Exception):
    """A peer that did not start, has ended or does not answer rightly; the reason in one line."""


def last_words(log: Path) -> str:
    """Why a process ended: the first error in its log, or else the last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [found[1] for line in lines if (found := _RAISED.match(line))]
    return (raised[:1] or lines[-1:] or ["it ended without a word"])[0]


def resident_mb(root: psutil.Process) -> float:
    """RSS of a process and all below it; what they share, at most what one does, counts once."""
    figures = [each.memory_full_info() for each in (root, *root.children(recursive=True))]
    return (sum(each.uss for each in figures) + max(each.rss - each.uss for each in figures)) / 1e6


def below(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All that it and its children have started; nothing if it has ended."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def reap(
    process: subprocess.Popen[str] | subprocess.Popen[bytes], family: list[psutil.Process]
) -> None:
    """Wait for the end of a process that was told to end; what is left then is killed."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    for one in alive:
        one.kill()
    psutil.wait_procs(alive)
