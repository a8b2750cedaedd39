"""Environment variables of a worker, which its process sets before it imports torch.

With a `runtime_env` Ray would set them. It starts a process for that which imports Ray, and then
the worker's own, which imports it again: half a second of a processor for each worker.
"""

from __future__ import annotations

from disagg.config import TierConfig
from disagg.kernels.devices import VISIBLE
from disagg.messages import Role

# Spinning OpenMP threads beside other processes cost several times the time of the work itself.
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def environment_of(tier: TierConfig, role: Role) -> dict[str, str]:
    """What a worker of that pool adds to its environment."""
    environment = dict(WORKER_ENVIRONMENT)
    pool = tier.prefill if role == "prefill" else tier.decode
    if not pool.num_gpus:  # Ray hides no GPU from an actor that asks for none
        environment[VISIBLE] = ""
    if tier.engine.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(tier.engine.num_threads)
    return environment
