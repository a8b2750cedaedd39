"""What can be found wrong with a tier before any process starts."""

from __future__ import annotations

from disagg.config import TierConfig


def check_tier(tier: TierConfig) -> None:
    """Read the model's description and, on a CPU, do the arithmetic of its memory.

    Raises:
        StartupError: in words for the user; `ModelError` and `NotEnoughMemory` are two of them.
    """
    from disagg.engine.runner import check_engine

    check_engine(tier.engine, tier.directory)
