"""What this process may use: cores and memory of its container (cgroup v2), and directories."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def user_directory(variable: str, below_home: str) -> Path | None:
    """The directory that a variable of XDG names, or the usual one in the user's home.

    None if there is neither, as in a container that runs as a user without a name.
    """
    if given := os.environ.get(variable):
        return Path(given).expanduser()
    home = os.path.expanduser("~")
    return Path(home, below_home) if os.path.isabs(home) else None


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Number of cores that this process may use: its CPU affinity, and the container's CPU quota.

    A fraction of a core is left out, because a thread without quota stops in the middle of a step.
    """
    num_cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        num_cores = min(num_cores, int(quota) // int(period))
    return max(1, num_cores)


def read_memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Total and available bytes, of the container where it has a limit."""
    table = _table(_read("/proc/meminfo").replace(":", ""))
    total, available = (table.get(name, 0) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total = int(limit)
        # Files that were read and are not in use count as used, and are dropped when needed.
        cached = _table(_read(cgroup / "memory.stat")).get("inactive_file", 0)
        available = min(available, total - int(used) + cached)
    return total, available


def _table(text: str) -> dict[str, int]:
    """The numbers of lines such as `inactive_file 4096`, by their names."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
