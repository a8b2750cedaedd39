"""Connections between the first rank of a worker and its ranks on other nodes.

The first rank listens until all ranks have connected, each with two connections. Both sides prove
that they know the cluster key before any message is read; as on links, nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import select
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

from disagg.errors import StartupError
from disagg.links.connection import NONCE_NBYTES, proof_of

log = logging.getLogger(__name__)

Channel: TypeAlias = Literal[0, 1]
CONTROL: Channel = 0
STEPS: Channel = 1
Address: TypeAlias = tuple[str, int]

PROOF_NBYTES = hashlib.sha256().digest_size
VISITOR = struct.Struct(f"!IB{NONCE_NBYTES}s{PROOF_NBYTES}s")  # rank, channel, nonce, proof
SHAKE_TIMEOUT_S = 5.0  # how long a connection that sends too little may block the others
PATIENCE_S = 600.0  # how long a rank waits for the first rank, which may wait for GPU memory
VANISHED_S = 4  # time after which a node is noticed that is gone without closing its connections


class RankListener:
    """Accepts the connections of ranks on other nodes.

    Args:
        host: the address of this machine on which it listens.
        key: the cluster's secret.
        worker_id: only the ranks of this worker are accepted.

    Raises:
        StartupError: it cannot listen on the address.
    """

    def __init__(self, host: str, key: bytes, worker_id: str) -> None:
        self._key, self._worker_id = key, worker_id
        self._found: dict[tuple[int, int], Connection] = {}
        self._listener = listen(host)
        address = self._listener.getsockname()
        self.address: Address = address[0], address[1]

    def take(self, rank: int, timeout_s: float) -> tuple[Connection, Connection] | None:
        """The connections of a rank for control and for steps; None if it did not connect."""
        deadline = time.monotonic() + timeout_s
        keys = (rank, CONTROL), (rank, STEPS)
        while not all(each in self._found for each in keys):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self._listener.settimeout(left_s)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                return None
            self._check(connection)
        return self._found.pop(keys[0]), self._found.pop(keys[1])

    def close(self) -> None:
        self._listener.close()
        for connection in self._found.values():
            connection.close()

    def _check(self, connection: socket.socket) -> None:
        """Accept a connection if it proves that it is a rank of this worker, or close it."""
        own = secrets.token_bytes(NONCE_NBYTES)
        try:
            connection.settimeout(SHAKE_TIMEOUT_S)
            connection.sendall(own)
            raw = _exactly(connection, VISITOR.size, SHAKE_TIMEOUT_S)
            rank, channel, nonce, proof = VISITOR.unpack(raw)
            claims = self._worker_id, rank, channel, own, nonce
            if not hmac.compare_digest(proof, _proof(self._key, b"rank", *claims)):
                raise OSError("it does not know this cluster's key, or is of another worker")
            connection.sendall(_proof(self._key, b"first", *claims))
            self._found[rank, channel] = _as_pipe(connection, channel)
        except OSError as error:
            log.warning("Closed a connection that is not from a rank of this worker: %s", error)
            connection.close()


def connect_rank(
    address: Address, key: bytes, worker_id: str, rank: int
) -> tuple[Connection, Connection]:
    """Connect a rank to the first rank, for control and for steps.

    Raises:
        StartupError: the first rank cannot be reached, or does not know the cluster key.
    """
    try:
        return (
            _connect(address, key, worker_id, rank, CONTROL),
            _connect(address, key, worker_id, rank, STEPS),
        )
    except OSError as error:
        raise StartupError(
            f"Cannot reach the first rank at {address[0]}:{address[1]} ({error}); the nodes of a"
            " worker must reach each other on all ports, so check firewalls.",
            param="nnodes",
        ) from error


def listen(host: str) -> socket.socket:
    """Listen on an address of this machine, on any free port. Raises `StartupError`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise StartupError(
            f"A worker over several nodes cannot listen on {host}: {error.strerror or error}. This"
            " is the node's address in Ray; set link_host to use another one.",
            param="link_host",
        ) from error


def is_over(connection: Connection, timeout_s: float | None = 0.0) -> bool:
    """Wait until the other side has closed, without reading. `timeout_s` None waits for ever."""
    return _has(connection, select.POLLRDHUP, timeout_s)


def has_message(connection: Connection) -> bool:
    """As `Connection.poll`, which takes five times as long: 11 us."""
    return _has(connection, select.POLLIN, 0.0)


def _has(connection: Connection, events: int, timeout_s: float | None) -> bool:
    watched = select.poll()
    watched.register(connection.fileno(), events)
    return bool(watched.poll(None if timeout_s is None else 1e3 * timeout_s))


def _connect(
    address: Address, key: bytes, worker_id: str, rank: int, channel: Channel
) -> Connection:
    connection = socket.create_connection(address, PATIENCE_S)
    try:
        nonce, first = (
            secrets.token_bytes(NONCE_NBYTES),
            _exactly(connection, NONCE_NBYTES, PATIENCE_S),
        )
        claims = worker_id, rank, channel, first, nonce
        connection.sendall(VISITOR.pack(rank, channel, nonce, _proof(key, b"rank", *claims)))
        answer = _exactly(connection, PROOF_NBYTES, PATIENCE_S)
        if not hmac.compare_digest(answer, _proof(key, b"first", *claims)):
            raise OSError("it does not know this cluster's key")
    except OSError:
        connection.close()
        raise
    return _as_pipe(connection, channel)


def _exactly(connection: socket.socket, nbytes: int, timeout_s: float) -> bytes:
    """Receive exactly `nbytes` bytes within `timeout_s`. Raises `OSError`."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while len(data) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise OSError("it closed the connection")
        data += piece
    return data


def _proof(
    key: bytes, role: bytes, worker_id: str, rank: int, channel: int, first: bytes, other: bytes
) -> bytes:
    own = b"%d/%d" % (rank, channel)
    return proof_of(key, b"disagg-rank", role, worker_id.encode(), own, first, other)


def _as_pipe(connection: socket.socket, channel: int) -> Connection:
    """Make a pipe of a connection that has proved itself.

    The control connection breaks when the other node is gone, which ends both sides. The connection
    for steps has no such limit, because it may be full for long while a rank computes.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if channel == CONTROL:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * VANISHED_S)
    return Connection(connection.detach())
