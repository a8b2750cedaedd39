"""The nodes and GPUs of the Ray cluster to which this process is connected."""

from __future__ import annotations

import ray

from disagg.capacity.node_check import Node
from disagg.devices import Device, Gpus

_KIND = "accelerator_type:"  # prefix of the name of a resource that each node with GPUs has


def gpus_of_cluster(*, only_free: bool = True) -> Gpus:
    """The GPUs of Ray's nodes, including nodes that are added on demand.

    Args:
        only_free: leave out GPUs that are in use.
    """
    if not ray.is_initialized():
        return Gpus(where="the cluster")
    resources = ray.cluster_resources()
    free = ray.available_resources() if only_free else resources
    total, num_free = int(resources.get("GPU", 0)), int(free.get("GPU", 0))
    kinds = sorted(each.removeprefix(_KIND) for each in resources if each.startswith(_KIND))
    device = Device("", ", ".join(kinds))
    return Gpus((device,) * num_free, where="the cluster", num_held=total - num_free)


def nodes_of_cluster() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"]
    ]
