"""Ranks of a worker on other nodes than its replica: actors in the replica's placement group.

Serve creates and removes the group together with the replica, and Ray ends an actor whose replica
has ended. The group has one bundle per node; the replica is in the first one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from disagg.capacity.node_check import resources_of_node
from disagg.config import PoolConfig, TierConfig
from disagg.devices import see_only
from disagg.errors import StartupError
from disagg.rank_messages import RankStart
from disagg.worker.rank import run_elsewhere
from disagg.worker.rank_listener import Address


def placement(tier: TierConfig, pool: PoolConfig) -> dict[str, Any]:
    """Serve's options to place each worker on its nodes; empty for workers on one node."""
    nnodes = tier.num_nodes(pool)
    if nnodes == 1:
        return {}
    return {
        "placement_group_bundles": [resources_of_node(tier, pool)] * nnodes,
        "placement_group_strategy": "STRICT_SPREAD",
    }


class RankActors:
    """Implements `worker.other_rank.RankNodes`, in a replica that Serve has placed.

    Args:
        host: address of the replica's node.
        is_on_gpu: whether each rank uses a GPU.

    Raises:
        StartupError: the replica is not in a placement group.
    """

    def __init__(self, host: str, nnodes: int, *, is_on_gpu: bool) -> None:
        self._group, self._is_on_gpu = ray.util.get_current_placement_group(), is_on_gpu
        if self._group is None:
            raise StartupError(
                f"A worker with nnodes = {nnodes} needs a placement group of Ray; deploy it with"
                " `serve deploy` or `disagg serve --ray-address`.",
                param="nnodes",
            )
        self.hosts: Sequence[str] = [host, *_hosts(self._group)[1:]]

    def launch(self, node: int, start: RankStart, listener: Address) -> _RankProcess:
        assert self._group is not None
        actor = _actors.options(
            num_cpus=0,
            num_gpus=1 if self._is_on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, node),
        ).remote()
        return _RankProcess(actor, actor.run.remote(start, listener))


def _hosts(group: PlacementGroup) -> list[str]:
    """The addresses of the nodes of a group, by bundle."""
    places = placement_group_table(group)["bundles_to_node_id"]
    hosts = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
    return [hosts[places[bundle]] for bundle in sorted(places)]


class _RankActor:
    """An actor whose process runs one rank and ends with it."""

    def run(self, start: RankStart, listener: Address) -> None:
        os.environ["OMP_NUM_THREADS"] = str(start.num_threads)  # before torch is imported
        see_only(ray.get_gpu_ids())
        run_elsewhere(start, listener)


_actors: Any = ray.remote(_RankActor)  # Ray does not type the methods of actors


class _RankProcess:
    """Implements `worker.other_rank.RemoteProcess`."""

    def __init__(self, actor: Any, running: ray.ObjectRef[None]) -> None:
        self._actor, self._running = actor, running

    def ended(self, timeout_s: float) -> str | None:
        ready, _ = ray.wait([self._running], timeout=timeout_s)
        if not ready:
            return None
        try:
            ray.get(self._running)
        except RayTaskError as error:  # an error of our own code; the last line follows a traceback
            return str(error).strip().splitlines()[-1]
        except RayError as error:
            return str(error).strip().splitlines()[0]
        return "its process has ended"

    def kill(self) -> None:
        ray.kill(self._actor)
