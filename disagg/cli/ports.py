"""Ports for what a command starts on this machine."""

from __future__ import annotations

import secrets
import socket

# Below those that systems hand to outgoing connections (32768 and up, or 49152): one of these may
# be taken between the moment in which it was free and that in which its server binds it. And above
# those that Ray gives its workers (up to 19999).
FIRST, END = 20_000, 32_000


def free_port() -> int:
    """One that nobody listens on, at any address of this machine."""
    while True:
        port = FIRST + secrets.randbelow(END - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
