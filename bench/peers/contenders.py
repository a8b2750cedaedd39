"""Engines in processes of their own, ours and the peers', which get the same requests in turns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.peers.children import NotRunning, below, last_words, reap, resident_mb
from bench.peers.environments import ROOT, VLLM_VARIABLES, NotInstalled, python_of
from disagg.app.worker_environment import WORKER_ENVIRONMENT

ANSWER_TIMEOUT_S = 600.0  # what a peer compiles when it starts included


@dataclass(frozen=True)
class Engine:
    """How to start one: a module of `bench.peers`, in which environment."""

    module: str
    arguments: tuple[str, ...] = ()
    environment: str = ""  # empty: ours
    variables: Mapping[str, str] = field(default_factory=dict)


OURS = "disagg"
AUTO = "disagg auto"  # as ours starts without flags
ENGINES = {
    OURS: Engine("disagg", variables=WORKER_ENVIRONMENT),
    AUTO: Engine("disagg", ("auto",), variables=WORKER_ENVIRONMENT),
    "openvino": Engine("openvino", environment="openvino"),
    "vllm": Engine("vllm", environment="vllm", variables=VLLM_VARIABLES),
    "llama.cpp": Engine("llama_cpp", environment="llama-cpp"),
    "generate": Engine("transformers", ("static",)),
    "continuous": Engine("transformers", ("continuous",)),
}


class Contender:
    """A running engine.

    Args:
        log: where its standard error goes.
        clock: what is measured of a turn: "seconds" of the clock, or of the processor ("cpu_s").

    Raises:
        NotInstalled, NotRunning
    """

    def __init__(
        self, engine: Engine, checkpoint: Path, threads: int, log: Path, clock: str = "seconds"
    ) -> None:
        python = python_of(engine.environment) if engine.environment else Path(sys.executable)
        inherited = {name: os.environ[name] for name in os.environ.keys() - {"OMP_NUM_THREADS"}}
        self._log, self._clock = log, clock
        with log.open("w") as words:
            self._process = subprocess.Popen(
                [
                    str(python),
                    *("-m", f"bench.peers.{engine.module}"),
                    *(str(checkpoint), str(threads), *engine.arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                cwd=ROOT,
                env={**inherited, **engine.variables},
            )
        self._read()

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each prompt. Raises `NotRunning`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer to read either
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
            self._process.stdin.flush()
        answer = self._read()
        return answer[self._clock], answer["outputs"]

    def resident_mb(self) -> float:
        return resident_mb(psutil.Process(self._process.pid))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        family = below(self._process)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        reap(self._process, family)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        was_late = timer.finished.is_set()
        timer.cancel()
        if not line:
            self.close()
            late = f"it did not answer in {ANSWER_TIMEOUT_S:.0f} s"
            raise NotRunning(late if was_late else last_words(self._log))
        message: dict[str, Any] = json.loads(line)
        return message


def start(
    names: list[str], checkpoint: Path, threads: int, scratch: Path, clock: str
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that run, and of the others why not."""
    running: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            log = scratch / f"{name}.log"
            running[name] = Contender(ENGINES[name], checkpoint, threads, log, clock)
        except (NotInstalled, NotRunning) as error:
            absent[name] = str(error)
            print(f"{name} does not run here: {error}", file=sys.stderr, flush=True)
    return running, absent
