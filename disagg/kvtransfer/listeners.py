"""The TCP sockets on which this process listens, according to the kernel."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

import psutil


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
    """The listening sockets of this process; empty where the system does not tell."""
    try:
        sockets = psutil.Process().net_connections("tcp")
    except (psutil.Error, OSError):
        return set()
    return {
        Listener(each.laddr.ip, each.laddr.port)
        for each in sockets
        if each.status == psutil.CONN_LISTEN
    }
