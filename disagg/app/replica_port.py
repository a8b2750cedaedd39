"""The addresses on which a Serve replica listens: HTTP of an ingress, and gRPC of all replicas."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from typing import Any

import ray

from disagg.app.haproxy_launcher import socket_of
from disagg.app.request_heads import BoundedHeads

log = logging.getLogger(__name__)

BACKLOG = 4096  # connections that wait to be accepted; beyond them HAProxy answers 503
_ALL_INTERFACES = ("0.0.0.0", "::", "")


def bind_to_node() -> None:
    """Make the servers of this replica listen only on the address of its node in Ray.

    Serve starts them when the replica is constructed: gRPC, which unpickles what it receives, on
    all interfaces, and HTTP where HAProxy listens for clients, though only HAProxy uses it. Peers
    use the node's address alone. Serve has no setting for either (Ray 2.60,
    `serve/_private/replica.py`), nor for the heads that its HTTP waits for. The replica's
    `__init__` calls this.
    """
    from ray.serve._private import replica

    for name, bound in (
        ("add_port_to_grpc_server", _add_port),
        ("start_asgi_http_server", _start_http),
    ):
        serves = getattr(replica, name, None)
        if serves is None:
            log.warning(
                "This Ray starts the servers of replicas in another way than Ray 2.60 (it has no"
                " %s): see docs/security.md for who can reach them.",
                name,
            )
        elif not isinstance(serves, functools.partial):
            setattr(replica, name, functools.partial(bound, serves))


def _add_port(add_port: Any, server: Any, address: str) -> int:
    host = ray.util.get_node_ip_address()
    netloc = f"[{host}]" if ":" in host else host
    port: int = add_port(server, address.replace("[::]", netloc))
    return port


async def _start_http(start: Any, app: Any, options: Any, **others: Any) -> Any:
    if options.host in _ALL_INTERFACES:
        options = options.model_copy(update={"host": ray.util.get_node_ip_address()})
    task, server = await start(app, options, **others)
    server.config.http = BoundedHeads  # read when the task begins
    # Bound now, since HAProxy looks for it as soon as it knows the port.
    near = _bound(socket_of(options.port))
    if near is not None:
        server.startup = functools.partial(_start_near, server.startup, server, near)
    return task, server


def _bound(path: str) -> socket.socket | None:
    """A socket that this user's processes can connect to from now on; None: only the port is."""
    if not path:
        return None
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a replica that had this port before, and died
        near.setblocking(False)
        near.bind(path)
        near.listen(BACKLOG)
    except OSError as error:  # a full disk, say
        log.warning("HAProxy reaches this ingress by TCP, as %s cannot be made: %s", path, error)
        near.close()
        return None
    return near


async def _start_near(startup: Any, server: Any, near: socket.socket, sockets: Any = None) -> None:
    """uvicorn's `Server.startup`, which listens on the sockets of one family."""
    await startup(sockets=sockets)

    def protocol() -> asyncio.Protocol:
        made: asyncio.Protocol = server.config.http_protocol_class(
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
        return made

    loop = asyncio.get_running_loop()
    server.servers.append(await loop.create_unix_server(protocol, sock=near, backlog=BACKLOG))
