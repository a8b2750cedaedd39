"""The command with scripted server processes: what it says, its statuses, and whom it lets live."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.app import haproxy_launcher
from disagg.cli.supervisor import SAME_SIGNAL_S
from disagg.host import free_port
from tests.e2e.command import until

# Runs the steps of its turn in place of `disagg.cli.server_process`.
SERVER = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path

order = json.loads(sys.stdin.buffer.readline())
turns = Path(os.environ["TURNS"])
turn = len(list(turns.glob("turn-*")))
(turns / f"turn-{{turn}}").write_text(json.dumps(order["is_restart"]))

def send(kind, **fields):
    os.write(int(sys.argv[-1]), json.dumps(dict(type=kind, **fields)).encode() + b"\\n")

for step in json.loads(os.environ["STEPS"])[turn]:
    match step:
        case "proxy":
            proxy = subprocess.Popen([turns / "haproxy", "600"], start_new_session=True)
            (turns / "new").write_text(str(proxy.pid))
            (turns / "new").rename(turns / f"proxy-{{turn}}")
        case "launch":
            become = "print(flush=True); time.sleep(0.5); os.execv(sys.argv[2], sys.argv[2:])"
            words = [sys.executable, "-c", f"import os, sys, time; {{become}}"]
            words += [{haproxy_launcher.__file__!r}, turns / "haproxy", "600"]
            proxy = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
            proxy.stdout.readline()  # it runs: a process that only begins has no words yet
            (turns / f"proxy-{{turn}}").write_text(str(proxy.pid))
        case "ready":
            send("Happened", event="ready", message="ready after 1 s")
        case "hang":
            send("Phase", name="hanging", limit_s=0.1, too_late="It hangs.")
            sys.stdin.buffer.readline()
        case "refuse":
            send("Failed", message="It cannot be.", param="port")
            sys.stdin.buffer.read()
        case "break":
            send("Failed", message="Ray broke.", is_refusal=False)
            sys.stdin.buffer.read()
        case "wait":
            assert sys.stdin.buffer.readline() == b"stop\\n"
        case "ignore":
            sys.stdin.buffer.read()
        case "exit":
            sys.exit(7)
"""
COMMAND = """
import sys
sys.executable = sys.argv.pop(1)
from disagg.cli.main import main
sys.exit(main())
"""


class Scripted:
    """A `disagg serve` in a process of its own, with a scripted server for each of its starts."""

    def __init__(self, directory: Path, *steps: str) -> None:
        self.directory = directory
        server = directory / "server"
        server.write_text(SERVER)
        server.chmod(0o700)
        shutil.copy(str(shutil.which("sleep")), directory / "haproxy")
        each = [turn.split() for turn in steps]
        own = {"TURNS": str(directory), "STEPS": json.dumps(each), "HOME": str(directory)}
        words = ["serve", "demo-small", "--port", str(free_port())]
        with (directory / "out").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(server), *words],
                env={**os.environ, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self, event: str) -> list[str]:
        lines = (self.directory / "out").read_text().splitlines()
        found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
        return [line["message"] for line in found if line["event"] == event]

    def proxy(self, turn: int) -> int:
        return int((self.directory / f"proxy-{turn}").read_text())

    def ended(self) -> int:
        status = self.process.wait(60)
        until(lambda: not any(map(runs, self.proxies())))  # a killed one is gone a moment later
        return status

    def proxies(self) -> list[int]:
        return [int(file.read_text()) for file in self.directory.glob("proxy-*")]


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


Start = Callable[..., Scripted]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    started: list[Scripted] = []

    def scripted(*steps: str) -> Scripted:
        started.append(Scripted(tmp_path, *steps))
        return started[-1]

    yield scripted
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize("proxy", ["proxy", "launch"])
def test_haproxy_lives_on_until_the_next_server_is_ready(start: Start, proxy: str) -> None:
    """Then it is told to end after its last stream, as that of the next one listens. So does its
    launcher, which may have told the HAProxy before it to stop listening."""
    command = start(f"{proxy} ready break", "proxy ready wait")
    until(lambda: len(command.said("ready")) == 2)
    until(lambda: not runs(command.proxy(0)))
    assert command.said("broken") == ["Ray broke."]
    restarts = [json.loads((command.directory / f"turn-{i}").read_text()) for i in (0, 1)]
    assert restarts == [False, True] and runs(command.proxy(1))
    command.process.send_signal(signal.SIGTERM)
    assert command.ended() == 0
    assert command.said("stopped") == ["Stopped."]


@pytest.mark.parametrize(
    ("steps", "status", "words"),
    [
        ("refuse", 2, "disagg: It cannot be. (--port)"),
        ("hang", 2, "disagg: It hangs."),
        ("break", 1, "Ray broke."),
        ("exit", 1, "The server process ended unexpectedly (status 7); its output is in"),
    ],
)
def test_a_first_start_that_fails(start: Start, steps: str, status: int, words: str) -> None:
    command = start(f"proxy {steps}")
    assert command.ended() == status
    assert words in (command.directory / "out").read_text()


def test_a_start_is_ended_by_one_signal(start: Start) -> None:
    """In phases with Ray: `tests/e2e/test_lifecycle.py`."""
    command = start("proxy ignore")
    until(lambda: any(command.directory.glob("proxy-*")))
    command.process.send_signal(signal.SIGINT)
    assert command.ended() == 0
    assert command.said("stopping") == ["SIGINT: stopping before the server is ready."]


def test_a_second_signal_ends_at_once(start: Start) -> None:
    command = start("proxy ready ignore")
    until(lambda: command.said("ready"))
    command.process.send_signal(signal.SIGINT)
    (sentence,) = until(lambda: command.said("stopping"))
    assert sentence.startswith("SIGINT: new requests are refused")
    time.sleep(SAME_SIGNAL_S)
    command.process.send_signal(signal.SIGTERM)
    assert command.ended() == 128 + signal.SIGTERM
