"""Sets environment variables that Ray and Ray Serve read when they are imported or started."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from disagg import logs
from disagg.app.haproxy import haproxy_environment
from disagg.cli.reports import Order

PROXY_TIMEOUT_S = 150.0  # for the processes of Serve's proxies; a busy machine took 50 s
DEFAULTS = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray runs its workers at nice 15. Our workers are the service, so they get normal priority.
    "RAY_worker_niceness": "0",
    # By default Serve kills a proxy that is not ready after 5 s, so starts fail on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PROXY_TIMEOUT_S),
    # By default Ray starts a worker process for each core at once, needed or not.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_task_events_report_interval_ms": "0",  # nothing reads task events
    "NO_COLOR": "1",  # Ray's output goes to files
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),  # by default Ray keeps 3 GB of each log
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
# Of a Ray that we start. It has stand-ins for the agents that would collect its metrics, and make
# environments for workers such as the one of `uv run`, which all of ours have anyway.
OF_OUR_RAY = {
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Otherwise Ray replaces 127.0.0.1 by the machine's network address and listens on all
    # addresses.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def prepare_environment(order: Order) -> None:
    """Set the variables for this process and its children, except those that the user has set.

    Raises:
        StartupError: HAProxy is not installed.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if order.ray_address is not None:
        return  # `check_address` has decided on the token
    os.environ.update(OF_OUR_RAY)
    os.environ.setdefault(logs.DIRECTORY, order.log_directory)
    if order.haproxy:
        directory = Path(order.directory) / "h"
        os.environ.update(haproxy_environment(directory, order.config.http))
    # By default Ray keeps its token in the home directory, which may be read-only or missing.
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
