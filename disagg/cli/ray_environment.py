"""Variables that Ray and Serve read when they are imported, and their processes at start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from disagg import logs
from disagg.app.haproxy import haproxy_environment
from disagg.cli.ports import free_port
from disagg.cli.reports import Order

_DEFAULTS = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray runs its workers at nice 15, behind whatever else the machine does; ours are the service.
    "RAY_worker_niceness": "0",
    # Serve kills a proxy that is not there after 5 s, and with it a start on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "NO_COLOR": "1",  # what Ray says goes to files
}


def prepare_environment(order: Order) -> None:
    """For this process and all below it. Variables that the user has set stay as they are.

    Raises:
        StartupError: there is no HAProxy.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if order.ray_address is not None:
        _use_token_of_ray()
        return
    os.environ.setdefault(logs.DIRECTORY, order.log_directory)
    if order.haproxy:
        directory = Path(order.directory) / "h"
        os.environ.update(haproxy_environment(directory, order.config.http.host, free_port))
    # Not Ray's default, a token in the home directory: that may be read-only, or not there.
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _use_token_of_ray() -> None:
    """Authenticate with the token that Ray itself would find: in RAY_AUTH_TOKEN, in the file named
    by RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token, where `ray start --head` has put it."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if os.environ.get("RAY_AUTH_TOKEN") or file.is_file():
        os.environ["RAY_AUTH_MODE"] = "token"
