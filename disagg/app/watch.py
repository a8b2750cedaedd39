"""Watches the processes of Ray, Serve and HAProxy while they serve, and reports changes."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from disagg import logs
from disagg.app import raylet_agent
from disagg.app.haproxy import HAProxyWatch
from disagg.app.probe import ask_here, runs

LOOK_PERIOD_S = 0.25
PROCESSES_PERIOD_S = 1.0
PROBE_PERIOD_S = 5.0

Say = Callable[..., None]  # takes an event's name, a sentence, and fields for programs

# Titles that Ray gives to Serve's processes. A replica's title ends with its current activity.
_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:([^.\s]+)")
_AGENT = re.compile(rf"ray::(\w+Agent)|\S+ -I -S {re.escape(raylet_agent.__file__)} (\w+)")
_CONTROLLER = re.compile(r"ray::ServeController")


class Watch:
    """Watches in its own thread until `close`.

    Attributes:
        broken: why nothing can be served any more; empty while the server works.

    Args:
        node: Ray's record of the processes of a local cluster; None for a running cluster, of which
            only `url` is checked.
        haproxy: watches HAProxy if we run it.
        url: URL of the server.
        stop: set when the server is broken.
    """

    def __init__(
        self,
        node: Any,
        haproxy: HAProxyWatch | None,
        url: str,
        say: Say,
        stop: threading.Event,
    ) -> None:
        self.broken = ""
        self._node = node
        self._haproxy = haproxy
        self._url = url
        self._say = say
        self._stop = stop
        self._closed = threading.Event()
        self._processes: dict[psutil.Process, str] = self._named() if node is not None else {}
        self._agents = _agents() if node is not None else []
        self._answers = True
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2 * PROBE_PERIOD_S)
        if self._haproxy is not None:
            self._haproxy.close()

    def _run(self) -> None:
        next_processes_s = next_probe_s = 0.0
        while not self._closed.wait(LOOK_PERIOD_S):
            now_s = time.monotonic()
            if self._node is None:
                if now_s >= next_probe_s:
                    next_probe_s = now_s + PROBE_PERIOD_S
                    self._probe()
                continue
            self._look_at_ray()
            if self.broken:
                return
            if self._haproxy is not None:
                self._haproxy.look()
            if now_s >= next_processes_s:
                next_processes_s = now_s + PROCESSES_PERIOD_S
                self._look_at_processes()

    def _look_at_ray(self) -> None:
        """Check Ray's raylet, its agents and GCS. Without them workers end, or never start."""
        dead = [kind for kind, _ in self._node.dead_processes()]
        dead = [kind for kind in ("raylet", "gcs_server") if kind in dead]
        # The raylet ends all workers when an agent died, and may itself not end for minutes.
        dead += [name for name, each in self._agents if not runs(each)]
        if dead:
            self.broken = (
                f"Ray's {dead[0]} process died, and all workers end with it. The output of the"
                " process is in the log directory."
            )
            self._stop.set()

    def _look_at_processes(self) -> None:
        before, after = self._processes, self._named()
        self._processes = after
        if self._stop.is_set():
            return
        for process, name in before.items():
            if process not in after and runs(process):  # its title was just being changed
                after[process] = name
            elif process not in after:
                why = logs.last_error(process.pid)
                sentence = f"{name} ended (process {process.pid})." + (f" {why}" if why else "")
                self._say("process_ended", sentence, pid=process.pid)
        for process, name in after.items():
            if process not in before:
                self._say(
                    "process_started", f"{name} started (process {process.pid}).", pid=process.pid
                )

    def _named(self) -> dict[psutil.Process, str]:
        """Serve's processes on this node, with names for people."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):
                name = _name(process)
                if name:
                    found[process] = name
        return found

    def _probe(self) -> None:
        try:
            with ask_here(f"{self._url}/live", PROBE_PERIOD_S):
                answers = True
        except OSError:
            answers = False
        if answers != self._answers and not self._stop.is_set():
            self._answers = answers
            if answers:
                self._say("answers_again", f"{self._url} answers again.")
            else:
                self._say("no_answer", f"{self._url} no longer answers.")


def _agents() -> list[tuple[str, psutil.Process]]:
    """The raylet's agents or their stand-ins, with their names."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            agent = _AGENT.match(" ".join(process.cmdline()))
            if agent is not None:
                found.append((agent[1] or agent[2], process))
    return found


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        title = " ".join(process.cmdline()[:1])
        replica = _REPLICA.match(title)
        if replica is not None:
            deployment = replica[1]
            return "An ingress" if deployment == "Ingress" else f"A worker of {deployment}"
        if _CONTROLLER.match(title):
            return "Serve's controller"
    return ""
