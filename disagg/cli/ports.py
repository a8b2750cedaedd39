"""Chooses ports for the servers that a command starts on this machine."""

from __future__ import annotations

import secrets
import socket

# Systems give outgoing connections ports from 32768 or 49152 on, so such a port may be taken after
# it was found free and before its server binds it. Ray gives its workers ports up to 19999.
FIRST, END = 20_000, 32_000


def free_port() -> int:
    """A port that no process uses, on any address of this machine."""
    while True:
        port = FIRST + secrets.randbelow(END - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
