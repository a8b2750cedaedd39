"""Cores and memory in a container, and a user without a home."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import pytest

from disagg import host
from disagg.app.address import find_token
from disagg.cli.serve import log_directory
from disagg.errors import StartupError
from disagg.host import read_memory, usable_cores, user_directory
from disagg.models.fetched import cached_file


@pytest.mark.parametrize(
    ("quota", "num_cores"),
    [("max 100000", 8), ("300000 100000", 3), ("150000 100000", 1), ("20000 100000", 1), (None, 8)],
)
def test_cores_are_limited_by_affinity_and_quota(
    quota: str | None, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path) == num_cores


def test_files_that_were_read_do_not_count_as_used_memory(tmp_path: Path) -> None:
    total_nbytes, available_nbytes = read_memory(tmp_path)  # of the machine
    assert total_nbytes > available_nbytes > 0
    limit_nbytes = min(64 << 20, available_nbytes)
    (tmp_path / "memory.max").write_text(f"{limit_nbytes}\n")
    (tmp_path / "memory.current").write_text(f"{limit_nbytes - 4096}\n")
    assert read_memory(tmp_path) == (limit_nbytes, 4096)
    (tmp_path / "memory.stat").write_text("anon 4096\ninactive_file 8192\nactive_file 4096\n")
    assert read_memory(tmp_path) == (limit_nbytes, 4096 + 8192)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory(tmp_path)[0] == total_nbytes


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user without a name."""
    monkeypatch.delenv("HOME", raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_directory("XDG_STATE_HOME", ".local/state") == tmp_path / ".local/state"
    without_home(monkeypatch)
    assert user_directory("XDG_STATE_HOME", ".local/state") is None
    monkeypatch.setattr("disagg.cli.process_tree.temporary_directory", lambda: tmp_path)
    logs = log_directory(None, 8000)
    assert logs.parent == tmp_path / f"disagg-logs-{os.getuid()}" and logs.is_dir()
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / f"disagg-logs-{os.getuid()}").symlink_to(tmp_path)  # by another user of the machine
    monkeypatch.setattr("disagg.cli.process_tree.temporary_directory", lambda: planted)
    with pytest.raises(StartupError, match="--log-dir"):
        log_directory(None, 8000)
    with pytest.raises(StartupError, match="XDG_CACHE_HOME"):
        cached_file("smollm2")
    assert find_token()[0] == ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_file("smollm2").is_relative_to(tmp_path)


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = host.free_port()
    assert host.FIRST_PORT <= free < host.END_PORT
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        drawn = iter([taken - host.FIRST_PORT, free - host.FIRST_PORT])
        monkeypatch.setattr(secrets, "randbelow", lambda end: next(drawn))
        assert host.free_port() == free
    socket.create_server(("127.0.0.1", free)).close()
