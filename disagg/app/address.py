"""Whether a Ray cluster is there at all, before Ray is imported."""

from __future__ import annotations

import socket

from disagg.errors import StartupError

CONNECT_TIMEOUT_S = 5.0


def check_address(address: str) -> None:
    """Raises `StartupError` if nobody listens at HOST:PORT; other forms are Ray's to read."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise StartupError(
            f"No Ray cluster answers at {address}: {error.strerror or error}. Start one with"
            " `ray start --head`, or give the address that it printed.",
            param="ray_address",
        ) from error
