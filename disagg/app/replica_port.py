"""Where the gRPC server of a Serve replica listens."""

from __future__ import annotations

import functools
import logging
from typing import Any

import ray

log = logging.getLogger(__name__)


def bind_to_node() -> None:
    """Have the gRPC server of this replica listen on the address of its node in Ray only.

    Serve starts it on all interfaces when the replica is constructed, and it unpickles what it
    receives: whoever reaches it runs code here. Peers use the node's address alone. Serve has no
    setting for it (Ray 2.60, `serve/_private/replica.py`). The replica's `__init__` calls this.
    """
    from ray.serve._private import replica

    try:
        add_port = replica.add_port_to_grpc_server
    except AttributeError:
        log.warning(
            "This Ray starts the gRPC server of replicas in another way than Ray 2.60: see"
            " docs/security.md for who can reach it."
        )
        return
    if not isinstance(add_port, functools.partial):
        replica.add_port_to_grpc_server = functools.partial(_add_port, add_port)


def _add_port(add_port: Any, server: Any, address: str) -> int:
    host = ray.util.get_node_ip_address()
    netloc = f"[{host}]" if ":" in host else host
    port: int = add_port(server, address.replace("[::]", netloc))
    return port
