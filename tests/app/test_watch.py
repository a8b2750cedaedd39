"""What is said of Ray's and Serve's processes as they come and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from disagg import logs
from disagg.app import private_ray, raylet_agent, watch
from disagg.app.watch import Watch


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_who_has_no_title_for_a_moment_has_not_ended(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PROCESSES_PERIOD_S", 1e9)  # this test looks
    titles = {child.pid: "A worker of it"}
    monkeypatch.setattr(watch, "_name", lambda process: titles.get(process.pid, ""))
    monkeypatch.setattr(logs, "last_error", lambda pid: f"The engine of {pid} failed.")
    events: list[str] = []
    said: list[str] = []

    def say(event: str, sentence: str, **fields: Any) -> None:
        events.append(event)
        said.append(sentence)

    node = SimpleNamespace(dead_processes=list)
    looking = Watch(node, None, "", say, threading.Event())
    looking.close()
    titles.clear()
    looking._look_at_processes()
    looking._look_at_processes()
    assert events == []
    child.kill()
    psutil.wait_procs([psutil.Process(child.pid)])
    looking._look_at_processes()
    looking._look_at_processes()
    assert events == ["process_ended"]
    pid = child.pid
    assert said == [f"A worker of it ended (process {pid}). The engine of {pid} failed."]


FLAGS = ["agent.py", "--node-ip-address=127.0.0.1", "--node-id=a1"]  # as the raylet gives them


@pytest.mark.parametrize("agent", ["dashboard_agent", "runtime_env_agent", "RuntimeEnvAgent"])
def test_an_agent_that_dies_ends_everything(agent: str, tmp_path: Path) -> None:
    """Of ours or Ray's. The raylet ends with it, sooner or later, and all workers with it."""
    command, program = [f"ray::{agent}", "600"], shutil.which("sleep")
    environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
    if agent in raylet_agent.PORTS:
        flags = [*FLAGS, f"--session-dir={tmp_path}"]
        command, program = [*private_ray._agent_command(agent), *flags], sys.executable
    stop = threading.Event()
    with subprocess.Popen(command, executable=program, env=environment) as process:
        ports = {tmp_path / f"{port}_a1" for port in raylet_agent.PORTS.get(agent, ())}
        while psutil.Process(process.pid).cmdline() != command or set(tmp_path.iterdir()) != ports:
            assert process.poll() is None
        assert {port.read_text() for port in ports} <= {"-1"}
        looking = Watch(SimpleNamespace(dead_processes=list), None, "", lambda *_: None, stop)
        assert not stop.is_set()
        process.kill()
        assert stop.wait(60)
        looking.close()
    assert looking.broken.startswith(f"Ray's {agent} process died")
