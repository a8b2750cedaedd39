"""The addresses on which a Serve replica listens: HTTP of an ingress, and gRPC of all replicas."""

from __future__ import annotations

import functools
import logging
from typing import Any

import ray

from disagg.app.request_heads import BoundedHeads

log = logging.getLogger(__name__)

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
    return task, server
