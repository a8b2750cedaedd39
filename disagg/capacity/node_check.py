"""Checks whether a cluster's nodes can hold workers of several GPUs or nodes. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.errors import StartupError

LEAST_CPUS = 0.001  # Ray does not place a bundle without resources


class Node(NamedTuple):
    """A node. resources: its total resources by Ray's names: GPU, CPU, and custom ones."""

    address: str
    resources: Mapping[str, float]

    def has(self, asked: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in asked.items())


def resources_of_node(tier: TierConfig, pool: PoolConfig) -> dict[str, float]:
    """The resources that a worker of a pool needs on each of its nodes."""
    asked = {"CPU": max(pool.num_cpus, LEAST_CPUS), **pool.resources}
    if pool.num_gpus:
        asked["GPU"] = pool.num_gpus / tier.num_nodes(pool)
    return asked


def check_nodes(config: ServeConfig, nodes: Sequence[Node]) -> None:
    """Check that the cluster can place all workers of several GPUs or nodes.

    Args:
        config: a configuration in which each pool's `num_gpus` is set.

    Raises:
        StartupError: it can never place some worker; the message lists the nodes' resources.
    """
    for tier in config.tiers:
        for role, pool in tier.pools.items():
            nnodes = tier.num_nodes(pool)
            is_wanted = pool.num_replicas or pool.autoscaling is not None
            if not is_wanted or (nnodes == 1 and (pool.num_gpus or 0) <= 1):
                continue
            asked = resources_of_node(tier, pool)
            num_able = sum(node.has(asked) for node in nodes)
            if num_able < nnodes:
                raise StartupError(_too_few(tier, role, pool, nodes, num_able), param="nnodes")


def _too_few(
    tier: TierConfig, role: str, pool: PoolConfig, nodes: Sequence[Node], num_able: int
) -> str:
    nnodes, num_ranks = tier.num_nodes(pool), tier.num_ranks(pool)
    asked = resources_of_node(tier, pool)
    if asked["CPU"] == LEAST_CPUS and all(node.has({"CPU": LEAST_CPUS}) for node in nodes):
        del asked["CPU"]  # the user did not ask for CPUs
    each = f" with {_words(asked)}{' each' if nnodes > 1 else ''}" if asked else ""
    has = "; ".join(
        f"{node.address} has {_words({name: node.resources.get(name, 0.0) for name in asked})}"
        if asked
        else node.address
        for node in nodes
    )
    able = next(
        (
            number
            for number in range(2, num_ranks + 1)
            if num_ranks % number == 0 and _fits(tier, pool, number, nodes)
        ),
        None,
    )
    advice = (
        "Add nodes, or change tensor_parallel_size and nnodes."
        if able is None or able == nnodes
        else f"Set nnodes to {able} to divide it over {able} nodes."
    )
    return (
        f"A {role} worker of tier {tier.name!r} ({num_ranks} ranks) needs {nnodes} node"
        f"{'s' if nnodes > 1 else ''}{each}, and the cluster has {num_able} ({has}). {advice}"
    )


def _fits(tier: TierConfig, pool: PoolConfig, nnodes: int, nodes: Sequence[Node]) -> bool:
    asked = {**resources_of_node(tier, pool)}
    if pool.num_gpus:
        asked["GPU"] = pool.num_gpus / nnodes
    return sum(node.has(asked) for node in nodes) >= nnodes


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
