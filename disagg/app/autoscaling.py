"""Autoscaling through Ray Serve: ingresses report their load, one decision sizes all pools.

Ingress replicas report demand and the workers' load once a second, as Serve's custom autoscaling
metrics. In its controller, Serve calls the policy of each deployment (`pool_policy`); the policies
of one application share the `Scaler` here. So this needs no process, port or call of its own, and
nothing of it is on a request's path. Serve's request counters see nothing (requests go over our
links), and its delays are 0: only `router/autoscale.py` decides when to scale.

If reports stop, for example because an ingress is gone, pools keep their size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

from disagg.config import ServeConfig, TierConfig
from disagg.messages import Role
from disagg.router.autoscale import Autoscaler, PoolTarget, pools
from disagg.router.demand import RequestTotals
from disagg.router.load_report import asked_in, state_in
from disagg.router.worker_view import Pool

logger = logging.getLogger(__name__)

INGRESS = "Ingress"
POLICY = "disagg.app.pool_policy:PoolPolicy"
PERIOD_S = 1.0  # of reports, and between decisions
STALE_S = 5.0  # older reports are ignored


def is_scaled(config: ServeConfig) -> bool:
    return any(pool.autoscaling for tier in config.tiers for _, pool in pools(tier))


def deployment_name(model: str, role: Role) -> str:
    return f"{model}-{role}"


def serve_options(config: ServeConfig, least: int, first: int, most: int) -> ServeAutoscaling:
    """For a deployment that starts with `first` replicas."""
    scaled = {
        "tiers": [msgspec.to_builtins(tier) for tier in config.tiers],
        "max_num_workers": config.max_num_workers,
    }
    with warnings.catch_warnings():
        # Serve 2.60 deprecates the interval, and has no replacement yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscaling(
            min_replicas=least,
            initial_replicas=first,
            max_replicas=most,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            metrics_interval_s=PERIOD_S,
            look_back_period_s=2 * PERIOD_S,
            policy={"policy_function": POLICY, "policy_kwargs": {"config": scaled}},
        )


class Scaler:
    """The decisions for one application. The policies of all its deployments call it."""

    def __init__(self, tiers: Iterable[TierConfig], max_num_workers: int | None) -> None:
        self._tiers = tuple(tiers)
        self._pools: dict[str, Pool] = {
            deployment_name(tier.name, role): (tier.name, role)
            for tier in self._tiers
            for role, pool in pools(tier)
            if pool.autoscaling or pool.num_replicas
        }
        self._num_present = {
            (tier.name, role): pool.num_replicas
            for tier in self._tiers
            for role, pool in pools(tier)
        }
        self._autoscaler = Autoscaler(self._tiers, max_num_workers)
        self._said: dict[str, dict[str, float]] = {}  # the last report of each ingress
        self._heard_s = self._decided_s = 0.0
        self._wanted: dict[Pool, PoolTarget] = {}
        self._lacks: dict[Pool, str] = {}

    def num_wanted(self, context: AutoscalingContext) -> int:
        """Replicas of the deployment that Serve asks about."""
        pool = self._pools.get(context.deployment_name)
        now = context.current_time
        if pool is None:  # the ingress
            if now - self._decided_s >= PERIOD_S:
                self._hear(context, now)
            return int(context.target_num_replicas)
        self._num_present[pool] = int(context.target_num_replicas)
        wanted = self._wanted.get(pool)
        return wanted.num_workers if wanted is not None else int(context.target_num_replicas)

    def _hear(self, context: AutoscalingContext, now: float) -> None:
        """Read the ingresses' latest reports, and decide if any is new."""
        said: dict[str, dict[str, float]] = {}
        newest_s = 0.0
        for name, by_replica in context.raw_metrics.items():
            for replica, series in by_replica.items():
                if series and series[-1].timestamp > now - STALE_S:
                    said.setdefault(str(replica), {})[name] = series[-1].value
                    newest_s = max(newest_s, series[-1].timestamp)
        if newest_s > self._heard_s:
            self._heard_s = newest_s
            self.decide(now, said)

    def decide(self, now: float, said: dict[str, dict[str, float]]) -> Mapping[Pool, PoolTarget]:
        """Decide the size of each pool from the reports of the ingresses."""
        seconds = now - self._decided_s if self._decided_s else PERIOD_S
        self._decided_s = now
        for tier in self._tiers:
            asked = RequestTotals()
            for ingress, its in said.items():
                before = self._said.get(ingress, its)  # a new ingress has no earlier report
                asked = asked.plus(asked_in(its, tier.name).since(asked_in(before, tier.name)))
            self._autoscaler.observe(tier.name, now, seconds, asked)
        self._said = said
        states = {
            pool: msgspec.structs.replace(
                state_in(said.values(), *pool), num_workers=self._num_present[pool]
            )
            for pool in self._pools.values()
        }
        self._wanted = self._autoscaler.decide(now, states)
        self._tell()
        return self._wanted

    def _tell(self) -> None:
        for pool, wanted in self._wanted.items():
            if wanted.lacks and not self._lacks.get(pool):
                logger.warning("An SLO cannot be met by any number of workers. %s.", wanted.lacks)
            self._lacks[pool] = wanted.lacks
            figures = {
                "wanted_replicas": wanted.num_workers,
                "present_replicas": self._num_present[pool],
                "predicted_p95_seconds": wanted.predicted_s,
                "slo_seconds": wanted.slo_s,
            }
            for name, value in figures.items():
                _gauge(name).set(value, tags={"model_name": pool[0], "role": pool[1]})


@cache
def _gauge(name: str) -> Gauge:
    """A gauge in the metrics that Ray exports."""
    return Gauge(f"disagg_pool_{name}", "Of the autoscaler", tag_keys=("model_name", "role"))


_scalers: dict[str, tuple[dict[str, Any], Scaler]] = {}  # by application, and for which settings


def scaler_of(application: str, config: dict[str, Any]) -> Scaler:
    """The scaler of an application in this process. New settings, as after an update, create a new
    one."""
    known = _scalers.get(application)
    if known is None or known[0] != config:
        tiers = msgspec.convert(config["tiers"], list[TierConfig])
        known = _scalers[application] = config, Scaler(tiers, config["max_num_workers"])
    return known[1]
