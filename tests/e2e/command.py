"""`disagg serve` as a process that is signalled, killed and robbed, and what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from disagg.app.probe import runs
from disagg.cli import process_tree
from disagg.host import free_port
from tests import plain_http

TIMEOUT_S = 240.0
NUM_STREAMS = 12
DONE = "data: [DONE]"
_MARK = "DISAGG_TEST_MARK"
STAND_IN = Path(__file__).parent / "stand_in"


LEFT_TIMEOUT_S = 60.0  # workers of a Ray that was killed end one by one
SOON_S = 5.0
MOST_PAUSE_S = 0.25  # between two looks, some of which are at all processes of the machine


def with_stand_in() -> str:
    """The `PYTHONPATH` of processes in which `stand_in/sitecustomize.py` changes modules."""
    return os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH", "")]))


def until(
    condition: Callable[[], Any],
    timeout_s: float = TIMEOUT_S,
    why: Callable[[], str] = lambda: "it did not happen",
) -> Any:
    """What `condition` returns when it is true at last."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.05
    while not (value := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, MOST_PAUSE_S)
    return value


def soon(condition: Callable[[], Any]) -> bool:
    """Whether `condition` is true within `SOON_S`."""
    deadline = time.monotonic() + SOON_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(MOST_PAUSE_S)
    return bool(value)


def is_open(port: int) -> bool:
    """Whether somebody listens here."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # whoever listened has closed meanwhile, as an HAProxy that ends
    return True


class Command:
    """A `disagg serve`, whose lines are JSON, with a home directory of its own."""

    def __init__(
        self,
        arguments: str,
        home: Path,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        before: str = "true",
        mounts: str = "",
        python: Path = Path(sys.executable),
        port: int | None = None,
    ) -> None:
        """Args:
        before: what a shell does first, such as `ulimit`.
        mounts: such commands that only the command shall see the effect of, such as `mount`.
        python: in whose environment disagg is installed.
        """
        self.port = free_port() if port is None else port
        netloc = f"[{host}]" if ":" in host else host
        self.url = f"http://{netloc}:{self.port}"
        self._mark = os.urandom(8).hex()
        self._shared_memory, self._runs = _shared_memory(), _dead_runs()
        # Serve keeps it on a running cluster.
        self._is_port_of_others = "--ray-address" in arguments or not self._has_free_port()
        self._output = home / f"output-{self.port}"
        command = f"{python} -m disagg.cli.main serve {arguments}"
        if "--config" not in arguments:  # such a file has to name `port`
            command += f" --port {self.port}"
            if "--host" not in arguments:
                command += f" --host {host}"
        own = {"OMP_NUM_THREADS": "1", "HOME": str(home), _MARK: self._mark}
        own["PYTHONPATH"] = with_stand_in()
        own["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.3"  # a controller looks about less often
        apart = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-rm"]
        shell = [*(apart if mounts else []), "/bin/sh", "-c"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*shell, f"{mounts or before} && exec {command}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=None if python == Path(sys.executable) else home,
                env={**os.environ, **own, **(environment or {})},
            )

    def output(self) -> str:
        return self._output.read_text()

    def messages(self) -> list[str]:
        """The sentences of its lines."""
        return [str(each["message"]) for each in self._lines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The lines of one event."""
        return [each for each in self._lines() if each["event"] == name]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.output().splitlines() if each.startswith("{")]

    def wait_ready(self) -> None:
        self.wait_for("ready")

    def wait_for(self, event: str, number: int = 1) -> dict[str, Any]:
        """A line of an event; the process must not end before it."""

        def seen() -> list[dict[str, Any]]:
            found = self.events(event)
            assert len(found) >= number or self.process.poll() is None, self.output()
            return found[number - 1 :]

        return dict(until(seen)[0])

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, words: str) -> list[psutil.Process]:
        """The processes below it with this name or in whose title these words are."""
        return [each for each in self.family() if is_named(each, words)]

    def one(self, words: str) -> psutil.Process:
        """The only such process. Waits for it: HAProxy may be two while one takes over from the
        other, and a child has its parent's name until it begins its own program."""

        def alone() -> psutil.Process | None:
            found = self.named(words)
            return found[0] if len(found) == 1 else None

        found: psutil.Process = until(alone, why=lambda: f"{words}: {self.named(words)}")
        return found

    def running(self, module: str) -> psutil.Process:
        """The process below it that runs this Python module."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if module in process.cmdline():
                    return process
        raise AssertionError(f"nobody runs {module}: {self.family()}")

    def ended(self) -> int:
        """Its exit status, when it and all that it started are gone."""
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()

    @contextlib.contextmanager
    def killed_at_the_end(self) -> Iterator[None]:
        """If it lives still when the block ends. Nothing may be left then."""
        try:
            yield
        finally:
            self.process.kill()
            self.process.wait()
            self.assert_nothing_left()

    def assert_only_own_lines(self) -> None:
        others = [line for line in self.output().splitlines() if not line.startswith("{")]
        assert not others, others

    def assert_nothing_left(self) -> None:
        """No process, port, directory or shared memory."""
        until(lambda: not self._processes(), LEFT_TIMEOUT_S, self.left)
        until(lambda: _dead_runs() <= self._runs, LEFT_TIMEOUT_S, self.left)
        until(lambda: not self._left_memory(), LEFT_TIMEOUT_S, self.left)
        until(lambda: self._is_port_of_others or self._has_free_port(), LEFT_TIMEOUT_S, self.left)

    def _has_free_port(self) -> bool:
        """The kernel closes what killed processes had open after they are gone."""
        try:
            with socket.create_server(("", self.port)):
                return True
        except OSError:
            return False

    def _processes(self) -> list[psutil.Process]:
        """By a mark in the environment, which children inherit whatever becomes of parents."""
        return [each for each in psutil.process_iter() if _environment(each) == self._mark]

    def left(self) -> str:
        """What is left, for a failure's message."""
        return f"{self._processes()} {_dead_runs() - self._runs} {self._left_memory()}"

    def _left_memory(self) -> set[str]:
        """New shared memory that nobody uses: other programs of this machine make some, too."""
        new = _shared_memory() - self._shared_memory
        return new - _used_memory() if new else set()


class Streams:
    """Completions that are streamed to threads.

    Once it is made, all of them are under way at the same moment: a stream that ends before the
    last one has begun is followed by another one like it. So quick steps and slow threads do no
    harm.

    Args:
        lengths: the tokens of each stream.

    Attributes:
        ends: by the place of each that has ended: its last event, a refusal's status, or the error.
    """

    def __init__(self, url: str, lengths: Sequence[int], model: str = "demo-small") -> None:
        self._url = url
        self._lengths = lengths
        self._model = model
        self.ends: dict[int, str | int] = {}
        self._changed = threading.Condition()  # guards all below, and `ends`
        self._under_way: set[int] = set()
        self._repeats = True  # until all are under way, or one has failed
        self._threads = [
            threading.Thread(target=self._read, args=(place,)) for place in range(len(lengths))
        ]
        for thread in self._threads:
            thread.start()
        with self._changed:
            assert self._changed.wait_for(lambda: not self._repeats, TIMEOUT_S), self._under_way
            assert set(self.ends.values()) <= {DONE}, self.ends

    def wait(self, length: int | None = None) -> list[str | int]:
        """How the streams of this length have ended; without one, how all have."""
        places = [i for i, each in enumerate(self._lengths) if length in (None, each)]
        for place in places:
            self._threads[place].join(TIMEOUT_S)
        return [self.ends[place] for place in places]

    def _read(self, place: int) -> None:
        while True:
            try:
                end = self._end_of_one(place)
            except httpx.HTTPError as error:
                end = repr(error)
            with self._changed:
                self._under_way.discard(place)
                if end != DONE or not self._repeats:
                    self.ends[place] = end
                    self._repeats = False
                    self._changed.notify_all()
                    return

    def _end_of_one(self, place: int) -> str | int:
        body = {
            "model": self._model,
            "prompt": f"a story about number {place}",
            "max_tokens": self._lengths[place],
            "stream": True,
            "ignore_eos": True,
        }
        last = ""
        url = f"{self._url}/v1/completions"
        with plain_http.stream("POST", url, json=body, timeout=60) as answer:
            if answer.status_code != 200:
                return answer.status_code
            for line in filter(None, answer.iter_lines()):
                if not last:
                    self._begins(place)
                last = line
        return last

    def _begins(self, place: int) -> None:
        with self._changed:
            self._under_way.add(place)
            if len(self._under_way) == len(self._lengths):
                self._repeats = False
                self._changed.notify_all()


def refusal_of(command: Command) -> str:
    """What a start says that cannot work; it leaves nothing."""
    assert command.ended() == 2, command.output()
    command.assert_nothing_left()
    assert "Traceback" not in command.output(), command.output()
    (line,) = [each for each in command.output().splitlines() if each.startswith("disagg: ")]
    return line


def ask(url: str, model: str = "demo-small") -> httpx.Response:
    """A short completion on a connection of its own. Raises `httpx.HTTPError`."""
    body = {"model": model, "prompt": "once", "max_tokens": 3}
    return plain_http.post(f"{url}/v1/completions", json=body, timeout=30)


def is_named(process: psutil.Process, words: str) -> bool:
    """Whether it lives, and has this name or a title with these words."""
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        has_name = process.name() == words or words in " ".join(process.cmdline()[:1])
        return has_name and runs(process)
    return False


def _environment(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(_MARK)
    except psutil.Error:
        return None


def _shared_memory() -> set[str]:
    """Its objects, which are files; a directory is some program's temporary one."""
    return {each.name for each in Path("/dev/shm").glob("*") if not each.is_dir()}


def _used_memory() -> set[str]:
    """Shared memory that a process has mapped."""
    used: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            used.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return used


def _dead_runs() -> set[Path]:
    """Directories of runs that are not alive."""
    found = set()
    for directory in process_tree.temporary_directory().glob(f"{process_tree.PREFIX}*"):
        try:
            if process_tree._is_dead(directory):
                found.add(directory)
        except OSError:
            continue
    return found
