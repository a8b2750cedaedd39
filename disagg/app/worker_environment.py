"""Environment variables of a worker, which its process sets before it imports torch.

Ray could set them with `runtime_env`, but that starts one more process per worker, which imports
Ray and takes half a second of CPU time.
"""

from __future__ import annotations

import msgspec

from disagg.config import ServeConfig, TierConfig
from disagg.devices import VISIBLE
from disagg.host import usable_cores
from disagg.messages import Role

# OpenMP threads must not spin while they wait: on a shared machine that takes several times as much
# CPU time as the work itself.
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def environment_of(tier: TierConfig, role: Role) -> dict[str, str]:
    """The variables that a worker of this pool adds to its environment."""
    environment = dict(WORKER_ENVIRONMENT)
    pool = tier.pools[role]
    if not pool.num_gpus:  # Ray hides no GPU from an actor that asks for none
        environment[VISIBLE] = ""
    if tier.engine.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(tier.engine.num_threads)
    return environment


def with_threads(config: ServeConfig, tier: TierConfig, role: Role, num_nodes: int) -> TierConfig:
    """Set `num_threads` for a worker if the configuration does not.

    Ray sets OMP_NUM_THREADS to `num_cpus`, and to 1 if `num_cpus` is 0, which is the default here.
    A worker on a GPU computes on the host when it loads weights (casts, rows of its rank, GGUF) and
    reduces over gloo. Workers of the other kind hardly use the cores then, so they do not count.

    Args:
        num_nodes: number of nodes in the cluster; Serve spreads the workers over them.
    """
    pool = tier.pools[role]
    if tier.engine.num_threads is not None:
        return tier
    num_threads = int(pool.num_cpus)
    if not pool.num_cpus:
        # The largest number of workers; each counts once for each of its nodes.
        num_workers = sum(
            other.num_nodes(each)
            * (each.autoscaling.max_replicas if each.autoscaling else each.num_replicas)
            for other in config.tiers
            for each in other.pools.values()
            if bool(each.num_gpus) == bool(pool.num_gpus)
        )
        num_on_node = -(-num_workers // max(1, num_nodes))
        num_threads = usable_cores() // max(1, num_on_node)
    engine = msgspec.structs.replace(tier.engine, num_threads=max(1, num_threads))
    return msgspec.structs.replace(tier, engine=engine)
