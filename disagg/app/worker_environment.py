"""Environment variables of a worker, which its process sets before it imports torch.

Ray could set them with `runtime_env`, but that starts one more process per worker, which imports
Ray and takes half a second of CPU time.
"""

from __future__ import annotations

from disagg.config import TierConfig
from disagg.kernels.devices import VISIBLE
from disagg.messages import Role

# OpenMP threads must not spin while they wait: on a shared machine that takes several times as much
# CPU time as the work itself.
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def environment_of(tier: TierConfig, role: Role) -> dict[str, str]:
    """The variables that a worker of this pool adds to its environment."""
    environment = dict(WORKER_ENVIRONMENT)
    pool = tier.prefill if role == "prefill" else tier.decode
    if not pool.num_gpus:  # Ray hides no GPU from an actor that asks for none
        environment[VISIBLE] = ""
    if tier.engine.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(tier.engine.num_threads)
    return environment
