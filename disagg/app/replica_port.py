"""The ports of Serve replicas: HTTP of ingresses, gRPC of all replicas.

It sets the addresses on which they listen, and has what uvicorn does not: limits of request heads,
and a short way for events of a stream. Only HAProxy should use the HTTP port of an ingress, and it
sends complete heads only. But a client that connects to the port directly reaches uvicorn, which
waits for the end of a head without a time limit and stores all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import weakref
from typing import Any

import ray
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from disagg.api.http.reply import WRITE_NOW
from disagg.app import private_ray
from disagg.app.haproxy_launcher import HEAD_S, socket_of

log = logging.getLogger(__name__)

BACKLOG = 4096  # connections that wait to be accepted; with more of them HAProxy answers 503
MAX_HEAD_NBYTES = 128 << 10  # four times the limit in `api/http/request.py`
_ALL_INTERFACES = ("0.0.0.0", "::", "")


def bind_to_node() -> None:
    """Make the servers of this replica listen only on the address of its Ray node.

    By default Serve's gRPC server, which unpickles what it receives, listens on all interfaces, and
    its HTTP server on the address that HAProxy listens on for clients, although only HAProxy uses
    it. Serve has no setting for either, nor for limits of request heads. Call it in the replica's
    `__init__`; Serve starts the servers after that.
    """
    private_ray.wrap_server("grpc", _add_port)
    private_ray.wrap_server("http", _start_http)


def node_of_replica() -> str:
    """The address of its Ray node."""
    return str(ray.util.get_node_ip_address())


def _add_port(add_port: Any, server: Any, address: str) -> int:
    host = node_of_replica()
    netloc = f"[{host}]" if ":" in host else host
    port: int = add_port(server, address.replace("[::]", netloc))
    return port


async def _start_http(start: Any, app: Any, options: Any, **others: Any) -> Any:
    if options.host in _ALL_INTERFACES:
        options = options.model_copy(update={"host": node_of_replica()})
    task, server = await start(app, options, **others)
    server.config.http = IngressProtocol  # the server reads it when its task begins
    # The socket is bound now, because HAProxy looks for it as soon as it knows the port.
    near = _bound(socket_of(options.port))
    if near is not None:
        server.startup = functools.partial(_start_near, server.startup, server, near)
    return task, server


def _bound(path: str) -> socket.socket | None:
    """A listening Unix socket for this user's processes; None if there is only the TCP port."""
    if not path:
        return None
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # left by a replica that died and had the same port
        near.setblocking(False)
        near.bind(path)
        near.listen(BACKLOG)
    except OSError as error:  # for example a full disk
        log.warning("Cannot create %s, so HAProxy reaches this ingress by TCP: %s", path, error)
        near.close()
        return None
    return near


async def _start_near(startup: Any, server: Any, near: socket.socket, sockets: Any = None) -> None:
    """uvicorn's `Server.startup`, plus a server on the Unix socket `near`."""
    await startup(sockets=sockets)

    def new_protocol() -> asyncio.Protocol:
        protocol: asyncio.Protocol = server.config.http_protocol_class(
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
        return protocol

    loop = asyncio.get_running_loop()
    server.servers.append(await loop.create_unix_server(new_protocol, sock=near, backlog=BACKLOG))


class IngressProtocol(HttpToolsProtocol):
    """Closes a connection if a head does not end within `HEAD_S` or is too long.

    It does so also while an answer runs, because the head of the next request may arrive then.
    Requests have the ASGI extension `WRITE_NOW`.
    """

    _timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _is_in_head = True  # whether the next bytes belong to a head; otherwise to a body
    _nbytes = 0  # bytes of the head, without those that arrived together with the end of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start()  # the limit applies to clients that send nothing, too

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._nbytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._nbytes > MAX_HEAD_NBYTES:
            self.transport.close()

    def on_message_begin(self) -> None:  # called for the first byte of a head
        if self._timer is None:
            self._start()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop()
        self._is_in_head = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # its task begins later
            write = functools.partial(_write_now, weakref.ref(self.cycle))  # which has the scope
            self.cycle.scope["extensions"] = {WRITE_NOW: {"loop": self.loop, "write": write}}

    def on_message_complete(self) -> None:
        self._is_in_head, self._nbytes = True, 0
        super().on_message_complete()

    def _start(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _write_now(of: weakref.ref[RequestResponseCycle], body: bytes) -> bool:
    """What `send` does with a part of a streamed body, if the client reads fast enough.

    Returns whether it does; an empty part, which would end the reply, only asks that.
    """
    cycle = of()
    if cycle is None or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
        return False
    if not cycle.chunked_encoding:  # not begun
        return False
    if body:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
