"""An actor on every node of a running Ray cluster, for a command that looks at the nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.app.address import check_address
from disagg.errors import StartupError


class NodeFailed(Exception):
    """A call on a node failed. The message is the exception that was raised there."""


class NodeActor(NamedTuple):
    """name: the node's host name with the begin of its id. ip: its address in the cluster."""

    name: str
    ip: str
    handle: Any

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of the actor. Raises `NodeFailed`."""
        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=timeout_s)
        except (RayError, TimeoutError) as error:
            raise NodeFailed((str(error).strip().splitlines() or [repr(error)])[-1]) from error


@contextmanager
def actors_on_nodes(address: str, actor: type) -> Iterator[list[NodeActor]]:
    """One `actor` on each node of the cluster, in the order of the nodes' names.

    They reserve no resources, so a busy node gets one too.

    Raises:
        StartupError: no cluster answers at the address.
    """
    check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise StartupError(
            f"No Ray cluster answers at {address}: {first}", param="ray_address"
        ) from error
    try:
        alive = [each for each in ray.nodes() if each["Alive"]]
        yield [_start(each, actor) for each in sorted(alive, key=lambda each: each["NodeName"])]
    finally:
        ray.shutdown()


def _start(node: dict[str, Any], actor: type) -> NodeActor:
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    handle = ray.remote(num_cpus=0, scheduling_strategy=strategy)(actor).remote()
    name = f"{node['NodeName']} ({node['NodeID'][:6]})"
    return NodeActor(name, node["NodeManagerAddress"], handle)
