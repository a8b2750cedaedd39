"""Variables that Ray and Serve read when they are imported, and their processes at start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from disagg import logs
from disagg.app.address import find_token, wants_token
from disagg.app.haproxy import haproxy_environment
from disagg.cli.ports import free_port
from disagg.cli.reports import Order

DEFAULTS = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray runs its workers at nice 15, behind whatever else the machine does; ours are the service.
    "RAY_worker_niceness": "0",
    # Serve kills a proxy that is not there after 5 s, and with it a start on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Else Ray starts a worker for each core at once, whether one is needed or not.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_task_events_report_interval_ms": "0",  # nobody asks what ran when
    "NO_COLOR": "1",  # what Ray says goes to files
    # Ray's agent logs once a second that there is no dashboard: 37 MB a day. By default Ray keeps
    # 3 GB of each of its logs.
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}


def prepare_environment(order: Order) -> None:
    """For this process and all below it. Variables that the user has set stay as they are.

    Raises:
        StartupError: there is no HAProxy.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if order.ray_address is not None:
        _use_token_of(order.ray_address)
        return
    # Ray takes the machine's address in the network for 127.0.0.1, and listens on all addresses,
    # unless it is told that there will be no cluster.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault(logs.DIRECTORY, order.log_directory)
    if order.haproxy:
        directory = Path(order.directory) / "h"
        os.environ.update(haproxy_environment(directory, order.config.http, free_port))
    # Not Ray's default, a token in the home directory: that may be read-only, or not there.
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _use_token_of(address: str) -> None:
    """Send Ray's token to a cluster that wants one, and to no other.

    The cluster decides, not RAY_AUTH_MODE: who sends none where one is wanted waits for ever, and
    who wants one where none is sent is not answered.
    """
    is_wanted = wants_token(address)
    if is_wanted is not None:
        os.environ["RAY_AUTH_MODE"] = "token" if is_wanted else "disabled"
    elif "RAY_AUTH_MODE" not in os.environ and find_token()[0]:
        os.environ["RAY_AUTH_MODE"] = "token"
