"""Serve's autoscaling policy of one pool, called ten times a second: returns the replica count.

Serve pickles a policy's class together with its module by value, so state that pools share cannot
be here: it is in `autoscaling`, which is imported by name.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext


class PoolPolicy:
    """The policy of one deployment: a pool of workers, or the ingress, whose size never changes but
    which reports its load.

    Args:
        config: tiers and budget, see `autoscaling.scaler_of`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        from disagg.app import autoscaling

        scaler = autoscaling.scaler_of(context.app_name, self._config)
        return scaler.num_wanted(context), {}
