"""Checks of one machine that need neither torch nor Ray: processor, memory, limits, ports.

Every check is a function of plain numbers, and a second function reads these numbers, so that tests
can produce each result. Reads Linux's files; if they are absent, the check says so.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from disagg.doctor.findings import Finding, Status
from disagg.host import read_memory, usable_cores
from disagg.kernels.cpu_library import SAMPLING, Found, find_library, find_step

GIB = 1 << 30
LEAST_OPEN_FILES = 1024  # a connection for each client, and Ray's own
ADVISED_OPEN_FILES = 65536
LEAST_SHM_NBYTES = GIB  # Docker gives 64 MB; Ray's object store and UCX live there
FULL_DISK = 0.95  # from here on Ray refuses to write objects
INFINIBAND = Path("/sys/class/infiniband")
PACKAGES = ("disagg", "torch", "triton", "ray", "msgspec", "redis")
PROGRAM_S = 10.0  # until a program has said its version
LEAST_CLOCK_ERROR_S, WRONG_CLOCK_ERROR_S = 0.1, 5.0


class Machine(msgspec.Struct, frozen=True):
    """What is told of a machine to judge a transfer.

    Attributes:
        name: in reports.
        host: equal for two nodes on one machine.
        link_bytes_per_s: of the fastest network device; 0 where none says.
        link_name: of that device.
    """

    name: str
    host: str
    num_gpus: int
    link_bytes_per_s: float
    link_name: str
    has_rdma: bool


def here(name: str, num_gpus: int) -> Machine:
    host = _read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
    return Machine(name, host, num_gpus, *link_speed(), bool(_names(INFINIBAND)))


def check_machine() -> list[Finding]:
    """Everything here but ports, which belong to the machine where HTTP listens."""
    return [
        _processor(),
        cpu_kernels(find_step(), find_library(SAMPLING)),
        memory(*read_memory()),
        shared_memory(os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks)
        if os.path.isdir("/dev/shm")
        else Finding("shared memory", "there is no /dev/shm", "warn", "mount tmpfs on /dev/shm"),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _names(INFINIBAND)),
        ptrace(_read("/proc/sys/kernel/yama/ptrace_scope")),
        disk(shutil.disk_usage("/tmp")),
        _network(),
        _versions(),
    ]


def cpu_kernels(step: Found, sampling: Found) -> Finding:
    """What computes decode steps and samples tokens here, where no GPU does."""
    sentence = f"decode steps: {step.sentence}; sampling: {sampling.sentence}"
    if not step.may_be_built and not sampling.may_be_built:
        return Finding("CPU kernels", sentence)
    advice = "install a C++ compiler (g++), then disagg once more: decode steps on a CPU are slower"
    return Finding("CPU kernels", sentence, "warn", advice)


def memory(total_nbytes: int, available_nbytes: int) -> Finding:
    found = f"{available_nbytes / GIB:.1f} GiB free of {total_nbytes / GIB:.1f}"
    if total_nbytes and available_nbytes < 2 * GIB:
        return Finding("memory", found, "warn", "stop other programs: Ray alone takes 1 to 2 GiB")
    return Finding("memory", found)


def shared_memory(nbytes: int) -> Finding:
    found = f"{nbytes / GIB:.2f} GiB in /dev/shm"
    if nbytes < LEAST_SHM_NBYTES:
        return Finding(
            "shared memory",
            found,
            "warn",
            "docker run --shm-size=2g, or in Kubernetes an emptyDir of medium: Memory on /dev/shm",
        )
    return Finding("shared memory", found)


def open_files(soft: int, hard: int) -> Finding:
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} (may be raised to {_limit(hard)})"
    if unlimited or soft >= 4 * LEAST_OPEN_FILES:
        return Finding("open files", found)
    status: Status = "wrong" if soft < LEAST_OPEN_FILES else "warn"
    return Finding("open files", found, status, f"ulimit -n {ADVISED_OPEN_FILES}")


def locked_memory(soft: int, infiniband: list[str]) -> Finding:
    """RDMA pins the KV cache, which a limit refuses."""
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} bytes"
    if unlimited or not infiniband:
        return Finding("locked memory", found)
    found = f"{found}, and {', '.join(infiniband)} must pin the KV cache"
    return Finding("locked memory", found, "wrong", "ulimit -l unlimited")


def ptrace(scope: str) -> Finding:
    """Between processes of a machine UCX reads by process_vm_readv, which Yama may forbid."""
    if scope in ("", "0"):
        return Finding("reading other processes", "allowed (no restriction by Yama)")
    return Finding(
        "reading other processes",
        f"restricted (kernel.yama.ptrace_scope = {scope}): workers of one machine copy KV twice",
        "warn",
        "sysctl kernel.yama.ptrace_scope=0, or run containers with --cap-add=SYS_PTRACE",
    )


def disk(usage: tuple[int, int, int]) -> Finding:
    total, used, free = usage
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} under /tmp"
    if total and used / total > FULL_DISK:
        return Finding("disk", found, "warn", "free some of /tmp: Ray stops writing at 95 %")
    return Finding("disk", found)


def clock(offset_s: float) -> Finding:
    """Deadlines are times of day: a clock that is ahead ends requests too early.

    Args:
        offset_s: of this machine's clock from that of the machine that asks.
    """
    found = f"{offset_s * 1e3:+.0f} ms from the clock here"
    if abs(offset_s) < LEAST_CLOCK_ERROR_S:
        return Finding("clock", found)
    status: Status = "wrong" if abs(offset_s) >= WRONG_CLOCK_ERROR_S else "warn"
    return Finding("clock", found, status, "run chrony or another NTP client on every node")


def port(host: str, number: int) -> Finding:
    """Whether HTTP could listen there, and who does if not."""
    check = f"port {number}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OverflowError:
            return Finding(
                check, "a port is 0 to 65535", "wrong", "disagg serve --port with a free one"
            )
        except OSError as error:
            who = listener(number)
            found = f"{who} listens there" if who else f"{host}: {error.strerror}"
            return Finding(check, found, "wrong", "disagg serve --port with a free one")
    return Finding(check, f"free on {host}")


def program(check: str, path: str, flag: str, advice: str) -> Finding:
    """A program that `disagg serve` starts, and its version.

    Args:
        flag: with which it says its version.
        advice: what to change where it does not run.
    """
    try:
        done = subprocess.run([path, flag], capture_output=True, text=True, timeout=PROGRAM_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(check, f"{path} does not run: {error}", "warn", advice)
    number = re.search(r"\d+\.\d+(\.\d+)?", done.stdout)
    if done.returncode or number is None:
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        return Finding(check, f"{path} does not run: {said or done.returncode}", "warn", advice)
    return Finding(check, f"{number[0]}, {path}")


def listener(number: int) -> str:
    """Which process listens on a TCP port here, as "nginx (pid 12)"; "" if unknown."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in map(str.split, _read(table).splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == number
    }
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(each) in sockets for each in (process / "fd").iterdir()):
                return f"{_read(process / 'comm')} (pid {process.name})"
        except OSError:
            continue  # ended meanwhile, or another user's
    return ""


def link_speed() -> tuple[float, str]:
    """Bytes a second of the fastest network device, and which one it is; (0, "") if none says."""
    speeds: list[tuple[float, str]] = []
    for rate in INFINIBAND.glob("*/ports/*/rate"):  # "400 Gb/sec (4X NDR)"
        words = _read(rate).split()
        if words:
            speeds.append((float(words[0]) * 1e9 / 8, rate.parent.parent.parent.name))
    for device in Path("/sys/class/net").glob("*"):
        megabits = _read(device / "speed")
        if device.name != "lo" and megabits.isdigit():
            speeds.append((int(megabits) * 1e6 / 8, device.name))
    return max(speeds, default=(0.0, ""))


def _processor() -> Finding:
    lines = _read("/proc/cpuinfo").splitlines()
    described = dict(
        (key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)
    )
    flags = set(described.get("flags", "").split())
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    found = f"{described.get('model name', 'unknown')}, {usable_cores()} cores usable"
    return Finding("processor", f"{found}, bf16 products: {', '.join(bf16) or 'none'}")


def _network() -> Finding:
    bytes_per_s, device = link_speed()
    infiniband = _names(INFINIBAND)
    found = f"{device}: {bytes_per_s * 8 / 1e9:.0f} Gb/s" if device else "no device says its speed"
    return Finding("network", f"{found}; RDMA devices: {', '.join(infiniband) or 'none'}")


def _versions() -> Finding:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding(
            "software", ", ".join(found), "wrong", f"pip install {' '.join(missing)} (or disagg)"
        )
    return Finding("software", ", ".join(found))


def _names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.glob("*"))


def _limit(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
