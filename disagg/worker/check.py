"""Checks of a tier's configuration and model before any process starts."""

from __future__ import annotations

from disagg.config import TierConfig
from disagg.messages import Role
from disagg.models.description import describe_model


def check_tier(tier: TierConfig, gpu_nbytes: int | None = None, is_here: bool = True) -> None:
    """Read the model's description, and check that the model fits into memory.

    Args:
        gpu_nbytes: memory of each GPU; None: not known here, so each worker checks its own.
        is_here: whether workers run on this machine.

    Raises:
        StartupError: with a message for the user; also as `ModelError` or `NotEnoughMemory`.
    """
    from disagg.engine.device.runner import check_engine

    model = describe_model(tier.directory)
    roles: tuple[Role, ...] = ("prefill", "decode") if tier.prefill.num_replicas else ("decode",)
    for role in roles:
        engine = tier.for_role(role).engine
        check_engine(engine, model, gpu_nbytes=gpu_nbytes, is_here=is_here)
