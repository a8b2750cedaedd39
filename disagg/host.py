"""What this process may use: cores and memory of its container (cgroup v2), directories, ports."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# An id that all containers of a machine share, and that changes when the machine reboots (Linux).
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Systems give outgoing connections ports from 32768 or 49152 on, so such a port may be taken after
# it was found free and before its server binds it. Ray gives its workers ports up to 19999.
FIRST_PORT, END_PORT = 20_000, 32_000


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
    quota, _, period = read_text(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        num_cores = min(num_cores, int(quota) // int(period))
    return max(1, num_cores)


def read_memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Total and available bytes, of the container where it has a limit."""
    table = _table(read_text("/proc/meminfo").replace(":", ""))
    total, available = (table.get(name, 0) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = read_text(cgroup / "memory.max"), read_text(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total = int(limit)
        # Files that were read and are not in use count as used, and are dropped when needed.
        cached = _table(read_text(cgroup / "memory.stat")).get("inactive_file", 0)
        available = min(available, total - int(used) + cached)
    return total, available


def free_port() -> int:
    """A port that no process uses, on any address of this machine."""
    while True:
        port = FIRST_PORT + secrets.randbelow(END_PORT - FIRST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def _table(text: str) -> dict[str, int]:
    """The numbers of lines such as `inactive_file 4096`, by their names."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def read_text(path: str | Path) -> str:
    """A file of the system as text; "" if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
