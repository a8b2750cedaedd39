"""Each verdict on a machine, from the numbers that lead to it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import sys
from pathlib import Path

import pytest

from disagg.kernels.cpu.library import Found
from disagg.tools.doctor import machine
from disagg.tools.doctor.report import Finding, Status

GIB = 1 << 30
COMPILED = Found(ctypes.CDLL(None), "compiled")
TO_BE_BUILT = Found(None, "torch", may_be_built=True)
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("finding", "status", "change"),
    [
        (machine.open_files(65536, UNLIMITED), "ok", ""),
        (machine.open_files(UNLIMITED, UNLIMITED), "ok", ""),
        (machine.open_files(1024, 4096), "warn", "ulimit -n"),
        (machine.open_files(256, 256), "wrong", "ulimit -n"),
        (machine.shared_memory(8 * GIB), "ok", ""),
        (machine.shared_memory(64 << 20), "warn", "--shm-size"),
        (machine.locked_memory(8 << 20, []), "ok", ""),
        (machine.locked_memory(UNLIMITED, ["mlx5_0"]), "ok", ""),
        (machine.locked_memory(8 << 20, ["mlx5_0"]), "wrong", "ulimit -l unlimited"),
        (machine.ptrace(""), "ok", ""),
        (machine.ptrace("0"), "ok", ""),
        (machine.ptrace("1"), "warn", "ptrace_scope=0"),
        (machine.memory(64 * GIB, 60 * GIB), "ok", ""),
        (machine.memory(64 * GIB, GIB), "warn", "stop other programs"),
        (machine.disk((100 * GIB, 50 * GIB, 50 * GIB)), "ok", ""),
        (machine.disk((100 * GIB, 97 * GIB, 3 * GIB)), "warn", "/tmp"),
        (machine.cpu_kernels(Found(None, "torch, because none is here"), COMPILED), "ok", ""),
        (machine.cpu_kernels(TO_BE_BUILT, COMPILED), "warn", "C++ compiler"),
        (machine.cpu_kernels(COMPILED, TO_BE_BUILT), "warn", "C++ compiler"),
        (machine.clock(0.02), "ok", ""),
        (machine.clock(-0.5), "warn", "NTP"),
        (machine.clock(90.0), "wrong", "NTP"),
    ],
    ids=lambda value: value.check if isinstance(value, Finding) else None,
)
def test_verdicts(finding: Finding, status: Status, change: str) -> None:
    assert finding.status == status
    assert (change in finding.change) and bool(finding.change) == (status != "ok")


def test_a_port_in_use_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        finding = machine.port("127.0.0.1", number)
    assert finding.status == "wrong"
    assert f"pid {os.getpid()}" in finding.found
    assert "--port" in finding.change
    assert machine.port("127.0.0.1", number).status == "ok"


def test_an_address_of_another_machine_is_no_place_to_listen() -> None:
    finding = machine.port("192.0.2.77", 8000)
    assert (finding.status, finding.found.split(":")[0]) == ("wrong", "192.0.2.77")


@pytest.mark.parametrize("number", [-1, 65536])
def test_a_number_that_is_no_port_is_said(number: int) -> None:
    finding = machine.port("127.0.0.1", number)
    assert (finding.status, finding.found) == ("wrong", "a port is from 0 to 65535")


def test_a_program_says_its_version_or_why_it_does_not_run(tmp_path: Path) -> None:
    finding = machine.program("Python", lambda: sys.executable, "--version", "install it")
    assert (finding.status, finding.change) == ("ok", "")
    assert finding.found == f"{platform.python_version()}, {sys.executable}"
    broken = tmp_path / "broken"
    for content in ("#!/bin/sh\necho it is broken >&2\nexit 1\n", "#!/nowhere\n"):
        broken.write_text(content)
        broken.chmod(0o755)
        finding = machine.program("broken", lambda: str(broken), "-v", "install it")
        assert (finding.status, finding.change) == ("warn", "install it")
        assert finding.found.startswith(f"{broken} does not run: ")


def test_this_machine_can_be_looked_at() -> None:
    checks = [finding.check for finding in machine.check_machine()]
    assert len(set(checks)) == len(checks) == 12
