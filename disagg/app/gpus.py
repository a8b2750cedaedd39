"""The nodes of the Ray cluster that this process is in, and their GPUs."""

from __future__ import annotations

import ray

from disagg.kernels.devices import Device, Gpus
from disagg.planner.node_check import Node

_KIND = "accelerator_type:"  # begins the name of a resource of each node with GPUs


def gpus_of_cluster(only_free: bool) -> Gpus:
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
    """Those that are up."""
    return [
        Node(each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"]
    ]
