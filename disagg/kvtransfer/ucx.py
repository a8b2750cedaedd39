"""UCX's settings, its log, and the sockets on which it listens. Only this file knows them.

UCX reads its settings from the environment when an agent is created. Its log (`UCX_PROTO_INFO`)
says which lane it chose for which transfers. It is written to memory of this process, where
`UcxLog` reads it. Must not know NIXL.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from disagg.errors import StartupError
from disagg.kvtransfer.slab import HOST

LOOPBACK = "lo"
MAX_NAME_NBYTES = 31  # of what UCX keeps of an agent's name
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_INFINIBAND = Path("/sys/class/infiniband")

_environment = threading.Lock()  # the process has one
_log = logging.getLogger(__name__)


def ucx_settings(
    interface: str | None, asked: Mapping[str, str], device_id: int = HOST
) -> dict[str, str]:
    """Variables for the environment of UCX.

    Args:
        interface: names of network devices, separated by commas, or None for UCX's own choice. With
            the loopback UCX uses no other device. With a network interface it also uses the RDMA
            devices of this machine, unless some of them are named.
        asked: the operator's settings; "UCX_" may be left out of their names. They take precedence
            over the environment of the process, and that over the settings derived here.
        device_id: the slab's device.

    Raises:
        StartupError: there is no such interface.
    """
    own = {name if name.startswith("UCX_") else f"UCX_{name}": v for name, v in asked.items()}
    defaults: dict[str, str] = {}
    if device_id != HOST:
        # Without NVLink UCX reads from another GPU's memory over TCP, at a hundredth of the speed
        # of the GPUs' own copies, unless this setting allows reads by them.
        defaults["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    if interface is not None and "UCX_NET_DEVICES" not in own:
        own["UCX_NET_DEVICES"] = ",".join(_net_devices(interface))
    unset = {name: v for name, v in defaults.items() if name not in os.environ}
    return unset | own


def interface_of(host: str) -> str | None:
    """The network interface with the IPv4 address of a host; None if none here has it."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        ips = [each.address for each in addresses if each.family == socket.AF_INET]
        if ips[:1] == [address]:
            return name
    return None


class Listener(NamedTuple):
    """address: IPv4 or IPv6, "0.0.0.0" and "::" for all of this machine."""

    address: str
    port: int

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


@contextmanager
def in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block, which one thread at a time may enter."""
    with _environment:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class UcxLog:
    """UCX's log of this process; UCX has one per process.

    Attributes:
        settings: for the environment while an agent is created. UCX opens its log with the first
            one. They are removed afterwards: child processes have no such file, and UCX would end
            them.
    """

    _of_process: UcxLog | None = None

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self._fd = -1
        self._offset = 0
        self._rest = b""
        self._tables = Tables()
        self._library: ctypes.CDLL | None = None
        if "UCX_LOG_FILE" not in os.environ and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("ucx-log")
            proto_info = os.environ.get("UCX_PROTO_INFO", "y")
            self.settings["UCX_LOG_FILE"] = f"/proc/self/fd/{self._fd}"
            self.settings["UCX_PROTO_INFO"] = proto_info

    @classmethod
    def of_process(cls) -> UcxLog:
        if cls._of_process is None:
            cls._of_process = cls()
        return cls._of_process

    def lane(self, agent: str, *, is_near: bool, nbytes: int) -> str:
        """The lane of an agent's reads of so many bytes: "cma", "cuda_ipc", "rc_mlx5", "tcp"...

        "" if UCX has not printed it, or prints to another file.

        Args:
            is_near: from a peer on the same machine.
        """
        self._read()
        return self._tables.lane(agent, is_near=is_near, nbytes=nbytes)

    def _read(self) -> None:
        """Read new lines: tables are stored, warnings go to our own log."""
        if self._fd >= 0:
            self._flush()
        while self._fd >= 0 and (new := os.pread(self._fd, 1 << 16, self._offset)):
            self._offset += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if not self._tables.take(text):
                    _log.warning("UCX says: %s", text.strip())

    def _flush(self) -> None:
        """Make UCX write what it has buffered."""
        if self._library is None:
            maps = Path("/proc/self/maps").read_text("utf-8", "replace")
            paths = re.findall(r"(/\S*/libucs\b\S*\.so\S*)", maps)
            if not paths:
                return
            self._library = ctypes.CDLL(paths[0])
        flush = getattr(self._library, "ucs_log_flush", None)
        if flush is not None:
            flush()


class Tables:
    """The protocol tables that UCX prints with `UCX_PROTO_INFO`.

    A table names the agent and the kind of peer, then the operation, then has a row per range of
    sizes. UCX prints one at the first operation of a kind with a kind of peer. Tables of several
    threads are interleaved, line by line.
    """

    _LINE = re.compile(r"\[[^]]*\] \[([^]]*)\]\s*(\|.*|\+--.*|)$")
    _PEER = re.compile(r"\|\s*(\S.*) (self|intra-node|inter-node) cfg#\d+")
    _ROW = re.compile(r"\|\s*(\d\S*)\.\.(\S+)\s*\|[^|]*\|([^|]*)\|")
    _LANE = re.compile(r"([a-z]\w*)/")

    def __init__(self) -> None:
        self._peers: dict[str, tuple[str, str]] = {}  # by thread: agent and where, of its table
        self._reading: set[str] = set()  # threads whose table is of reads
        # (agent, where) -> (first size, last size, lane) for each range
        self._reads: dict[tuple[str, str], list[tuple[float, float, str]]] = {}

    def take(self, line: str) -> bool:
        """One line of the log. False: it is not of a table."""
        found = self._LINE.match(line)
        if found is None:
            return not line.strip()
        thread, text = found[1], found[2]
        if peer := self._PEER.match(text):
            self._peers[thread] = (peer[1], peer[2])
            self._reading.discard(thread)
        elif "remote memory read" in text and thread in self._peers:
            self._reading.add(thread)
            self._reads[self._peers[thread]] = []
        elif thread in self._reading and (row := self._ROW.match(text)):
            lane = "+".join(dict.fromkeys(self._LANE.findall(row[3])))
            ranges = self._reads[self._peers[thread]]
            ranges.append((_size(row[1]), _size(row[2]), lane))
        return True

    def lane(self, agent: str, *, is_near: bool, nbytes: int) -> str:
        name = agent[:MAX_NAME_NBYTES]
        ranges = self._reads.get((name, "intra-node" if is_near else "inter-node"), ())
        return next((lane for low, high, lane in ranges if low <= nbytes <= high), "")


def _size(text: str) -> float:
    if text == "inf":
        return float("inf")
    return float(text.rstrip("KMG")) * _UNITS.get(text[-1], 1)


def _net_devices(interface: str) -> list[str]:
    names = [name.strip() for name in interface.split(",") if name.strip()]
    known = [name for _, name in socket.if_nameindex()]
    rdma = _rdma_devices()
    for name in names:
        if name not in known and name.partition(":")[0] not in {d.partition(":")[0] for d in rdma}:
            raise StartupError(
                f"transfer_interface names {name!r}, and this machine has no such network device;"
                f" it has {', '.join(known + rdma)}.",
                param="transfer_interface",
            )
    if names == [LOOPBACK] or any(name not in known for name in names):
        return names
    return names + rdma


def _rdma_devices() -> list[str]:
    """As UCX names them: device and port."""
    ports = sorted(_INFINIBAND.glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]
