"""Sets the addresses on which Serve replicas listen: HTTP of ingresses, gRPC of all replicas."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from typing import Any

import ray

from disagg.app import private_ray
from disagg.app.haproxy_launcher import socket_of
from disagg.app.http_protocol import IngressProtocol

log = logging.getLogger(__name__)

BACKLOG = 4096  # connections that wait to be accepted; with more of them HAProxy answers 503
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


def _add_port(add_port: Any, server: Any, address: str) -> int:
    host = ray.util.get_node_ip_address()
    netloc = f"[{host}]" if ":" in host else host
    port: int = add_port(server, address.replace("[::]", netloc))
    return port


async def _start_http(start: Any, app: Any, options: Any, **others: Any) -> Any:
    if options.host in _ALL_INTERFACES:
        options = options.model_copy(update={"host": ray.util.get_node_ip_address()})
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
