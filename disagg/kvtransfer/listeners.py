"""The TCP sockets on which this process listens, according to the kernel."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import NamedTuple

_LISTENS = "0A"


class Listener(NamedTuple):
    """address: IPv4 or IPv6, "0.0.0.0" and "::" for all of this machine."""

    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_public(self) -> bool:
        """The address is one that other networks may route to, or stands for all addresses."""
        address = ipaddress.ip_address(self.address)
        return address.is_unspecified or address.is_global


def listeners() -> set[Listener]:
    """The listening sockets of this process; empty on systems other than Linux."""
    own = _own_sockets()
    tables = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
    return {
        Listener(*_place(fields[1], family))
        for name, family in tables
        for fields in _rows(name)
        if fields[3] == _LISTENS and fields[9] in own
    }


def _own_sockets() -> set[str]:
    """Inodes."""
    found: set[str] = set()
    for fd in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _rows(table: str) -> list[list[str]]:
    try:
        lines = Path("/proc/self/net", table).read_text("ascii").splitlines()
    except OSError:
        return []
    return [line.split() for line in lines[1:]]


def _place(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """Parse an address in the kernel's notation: hexadecimal words in the machine's byte order."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return socket.inet_ntop(family, raw), int(port, 16)
