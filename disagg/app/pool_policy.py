"""Serve's autoscaling policy of one pool, which returns the number of replicas.

Serve calls it ten times a second. Serve pickles the class of a policy and its module by value, so
state that pools share must be in another module (`autoscaling`).
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext


class PoolPolicy:
    """The policy of one deployment: a pool of workers, or the ingress, whose size is constant.

    Args:
        config: tiers and limit of workers; see `autoscaling.scaler_of`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        from disagg.app import autoscaling

        scaler = autoscaling.scaler_of(context.app_name, self._config)
        return scaler.num_wanted(context), {}
