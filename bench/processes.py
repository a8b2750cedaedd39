"""The processes of a running system, by the titles that Ray gives them, and their CPU time."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def find(root: psutil.Process, mark: str) -> list[psutil.Process]:
    """Descendants of `root` with `mark` in their title.

    Raises:
        SystemExit: there are none; says which there are.
    """
    titles = {each: title(each) for each in root.children(recursive=True)}
    found = [each for each, text in titles.items() if mark in text]
    if not found:
        listed = "\n".join(text[:100] for text in titles.values())
        raise SystemExit(f"no process is titled {mark!r} among\n{listed}")
    return found


def process_cpu_s(pid: int) -> float:
    """User and system time, to the nanosecond: /proc has hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    return sum(process_cpu_s(each.pid) for each in processes)


def title(process: psutil.Process) -> str:
    """Empty for a process that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
