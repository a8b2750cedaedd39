"""Checks of a tier's configuration and model before any process starts."""

from __future__ import annotations

from disagg.config import TierConfig
from disagg.engine.device.check import check_engine
from disagg.engine.device.choices import choose_device
from disagg.messages import Role
from disagg.models.description import describe_model
from disagg.planner.shapes import shape_of
from disagg.planner.step_sizes import step_sizes


def check_tier(
    tier: TierConfig, gpu_nbytes: int | None = None, is_here: bool = True, gpu_name: str = ""
) -> int:
    """Read the model's description, and check that the model fits into memory.

    Args:
        gpu_nbytes: memory of each GPU; None: not known here, so each worker checks its own.
        is_here: whether workers run on this machine.
        gpu_name: as the driver says it; empty: not known.

    Returns:
        bytes of host memory that its workers take for KV and for the largest step, as far as that
        is known here.

    Raises:
        StartupError: with a message for the user; also as `ModelError` or `NotEnoughMemory`.
    """
    model = describe_model(tier.directory)
    host_nbytes = 0
    roles: tuple[Role, ...] = ("prefill", "decode") if tier.prefill.num_replicas else ("decode",)
    for role in roles:
        engine = tier.for_role(role).engine
        plan = check_engine(
            engine,
            model,
            gpu_nbytes=gpu_nbytes,
            is_here=is_here,
            largest_step=step_sizes(shape_of(model), gpu_name, engine.kv_cache_dtype),
        )
        each_nbytes = int(engine.kv_offloading_size * 2**30)
        if plan is not None and choose_device(engine) == "cpu":
            each_nbytes += plan.workspace_nbytes + plan.kv_nbytes(engine)
        pool = tier.prefill if role == "prefill" else tier.decode
        host_nbytes += each_nbytes * (pool.num_replicas + pool.num_standby)
    return host_nbytes
