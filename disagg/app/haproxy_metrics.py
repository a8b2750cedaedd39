"""HAProxy's counters of accepted and refused requests, for `/metrics`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from disagg.app.probe import ask_here

TIMEOUT_S = 1.0

_ENABLED, _PORT = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_METRICS_PORT"
_SERVES_PORT = "9101"  # Serve's default
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


def read() -> bytes:
    """The counters in Prometheus's text format; empty if there is no HAProxy or no answer."""
    if os.environ.get(_ENABLED) != "1":
        return b""
    port = os.environ.get(_PORT, _SERVES_PORT)
    try:
        with ask_here(f"http://127.0.0.1:{port}/metrics?scope=frontend", TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):
        return b""
    return "".join(_kept(text)).encode()


def _kept(text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        words = line.split(maxsplit=3)
        is_comment = line.startswith("#")
        name = words[2] if is_comment and len(words) > 2 else line.partition("{")[0]
        if name in _KEPT and (is_comment or _FRONTEND in line):
            yield line
