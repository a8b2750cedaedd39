"""Autoscaling with Ray Serve: ingresses report their load, and one decision sizes all pools.

Ingress replicas report demand and the workers' load once a second, as Serve's custom autoscaling
metrics. In its controller, Serve calls the policy of each deployment (`pool_policy`); the policies
of one application share a `Scaler`. So autoscaling needs no extra process, port or call, and does
not delay requests. Serve's own request counters are not used, because requests go over our links,
and its delays are 0: only `router/autoscale.py` decides when to scale.

If reports stop, for example because an ingress is gone, pools keep their size. All times are of one
steady clock of this process: clocks of nodes differ, and may be set while we run.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import msgspec
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

from disagg.app import private_ray
from disagg.config import ServeConfig, TierConfig
from disagg.messages import Role
from disagg.router.autoscale import Autoscaler, PoolTarget, ScalingDecision
from disagg.router.load_report import RequestTotals, read_pool_state, read_totals
from disagg.router.worker_view import Pool

logger = logging.getLogger(__name__)

INGRESS = "Ingress"
POLICY = "disagg.app.pool_policy:PoolPolicy"
PERIOD_S = 1.0  # between reports, and between decisions
NUM_DECISIONS = 20  # that are shown
STALE_S = 5.0  # an ingress that has said nothing new for so long is ignored


def is_scaled(config: ServeConfig) -> bool:
    return any(pool.autoscaling for tier in config.tiers for pool in tier.pools.values())


def deployment_name(model: str, role: Role) -> str:
    return f"{model}-{role}"


def serve_options(config: ServeConfig, least: int, first: int, most: int) -> ServeAutoscaling:
    """Serve's autoscaling options of a deployment that starts with `first` replicas."""
    scaled = {
        "tiers": [msgspec.to_builtins(tier) for tier in config.tiers],
        "max_num_workers": config.max_num_workers,
    }
    with warnings.catch_warnings():
        # Serve 2.60 deprecates metrics_interval_s but has no replacement yet.
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
    """Decides for one application. The policies of all its deployments call it.

    Args:
        clock: seconds, steady.
        tell: called with the last decisions, oldest first, when there is a new one.
    """

    def __init__(
        self,
        tiers: Iterable[TierConfig],
        max_num_workers: int | None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[Sequence[ScalingDecision]], None] = lambda decisions: None,
    ) -> None:
        self._tell = tell
        self._decisions: deque[ScalingDecision] = deque(maxlen=NUM_DECISIONS)
        self._tiers = tuple(tiers)
        self._clock = clock
        self._pools: dict[str, Pool] = {
            deployment_name(tier.name, role): (tier.name, role)
            for tier in self._tiers
            for role, pool in tier.pools.items()
            if pool.autoscaling or pool.num_replicas
        }
        self._num_present = {
            (tier.name, role): pool.num_replicas
            for tier in self._tiers
            for role, pool in tier.pools.items()
        }
        self._autoscaler = Autoscaler(self._tiers, max_num_workers)
        self._reports: dict[str, dict[str, float]] = {}  # the last report of each ingress
        # By ingress: the time on its last report, by its own clock, and when that was new here.
        self._heard: dict[str, tuple[float, float]] = {}
        self._decided_s: float | None = None
        self._is_silent = False
        self._targets: dict[Pool, PoolTarget] = {}
        self._lacks: dict[Pool, str] = {}

    def num_wanted(self, context: AutoscalingContext) -> int:
        """Replicas of the deployment that Serve asks about."""
        pool = self._pools.get(context.deployment_name)
        if pool is None:  # the ingress
            now = self._clock()
            if self._decided_s is None or now - self._decided_s >= PERIOD_S:
                self._read_reports(context, now)
            return int(context.target_num_replicas)
        self._num_present[pool] = int(context.target_num_replicas)
        target = self._targets.get(pool)
        return target.num_workers if target is not None else int(context.target_num_replicas)

    def _read_reports(self, context: AutoscalingContext, now: float) -> None:
        """Read the ingresses' latest reports, and decide if any is new."""
        series: dict[str, dict[str, Any]] = {}
        for name, by_replica in context.raw_metrics.items():
            for replica, points in by_replica.items():
                if points:
                    series.setdefault(str(replica), {})[name] = points[-1]
        heard: dict[str, tuple[float, float]] = {}
        reports: dict[str, dict[str, float]] = {}
        for ingress, last in series.items():
            newest = max(point.timestamp for point in last.values())
            before = self._heard.get(ingress, (0.0, 0.0))
            heard[ingress] = before if before[0] == newest else (newest, now)
            if heard[ingress][1] > now - STALE_S:
                reports[ingress] = {
                    name: point.value
                    for name, point in last.items()
                    if point.timestamp > newest - STALE_S
                }
        self._heard = heard
        if any(heard_s == now for _, heard_s in heard.values()):
            self._is_silent = False
            self.decide(now, reports)
        elif not reports and self._targets and not self._is_silent:
            self._is_silent = True
            logger.warning(
                "No ingress has reported its load for %g s. Pools keep their sizes.", STALE_S
            )

    def decide(self, now: float, reports: dict[str, dict[str, float]]) -> Mapping[Pool, PoolTarget]:
        """Decide the size of each pool from the reports of the ingresses."""
        seconds = PERIOD_S if self._decided_s is None else now - self._decided_s
        self._decided_s = now
        for tier in self._tiers:
            demand = RequestTotals()
            for ingress, report in reports.items():
                before = self._reports.get(ingress, report)  # a new ingress has no earlier report
                demand = demand.plus(
                    read_totals(report, tier.name).since(read_totals(before, tier.name))
                )
            self._autoscaler.observe(tier.name, now, seconds, demand)
        self._reports = reports
        states = {
            pool: msgspec.structs.replace(
                read_pool_state(reports.values(), *pool), num_workers=self._num_present[pool]
            )
            for pool in self._pools.values()
        }
        earlier, self._targets = self._targets, self._autoscaler.decide(now, states)
        self._export()
        self._tell_changes(earlier)
        return self._targets

    def _tell_changes(self, earlier: Mapping[Pool, PoolTarget]) -> None:
        changed = False
        for pool, target in self._targets.items():
            before = earlier[pool].num_workers if pool in earlier else self._num_present[pool]
            if target.num_workers != before:
                changed = True
                predicted_s = target.predicted_s if math.isfinite(target.predicted_s) else None
                self._decisions.append(
                    ScalingDecision(
                        time.time(),
                        *pool,
                        before,
                        target.num_workers,
                        predicted_s,
                        target.slo_s,
                        target.lacks,
                    )
                )
        if changed:
            self._tell(tuple(self._decisions))

    def _export(self) -> None:
        """Log and export the targets of all pools."""
        for pool, target in self._targets.items():
            if target.lacks and not self._lacks.get(pool):
                logger.warning("No number of workers can meet an SLO. %s.", target.lacks)
            self._lacks[pool] = target.lacks
            figures = {
                "wanted_replicas": target.num_workers,
                "present_replicas": self._num_present[pool],
                "predicted_p95_seconds": target.predicted_s,
                "slo_seconds": target.slo_s,
            }
            for name, value in figures.items():
                _gauge(name).set(value, tags={"model_name": pool[0], "role": pool[1]})


_TEXTS = {
    "wanted_replicas": "Number of replicas of a pool that the autoscaler has decided on",
    "present_replicas": "Number of replicas that Ray Serve aims at for a pool",
    "predicted_p95_seconds": "95th percentile of the latency that the autoscaler predicts for a"
    " pool: TTFT of prefill pools, TPOT of decode pools",
    "slo_seconds": "Latency that the autoscaler sizes a pool for",
}


@cache
def _gauge(name: str) -> Gauge:
    """A gauge in the metrics that Ray exports."""
    return Gauge(f"disagg_pool_{name}", _TEXTS[name], tag_keys=("model_name", "role"))


_scalers: dict[str, tuple[dict[str, Any], Scaler]] = {}  # settings and scaler by application


def scaler_of(application: str, config: dict[str, Any]) -> Scaler:
    """The scaler of an application in this process. Changed settings make a new one."""
    known = _scalers.get(application)
    if known is None or known[0] != config:
        tiers = msgspec.convert(config["tiers"], list[TierConfig])
        scaler = Scaler(tiers, config["max_num_workers"], tell=partial(_publish, application))
        known = _scalers[application] = config, scaler
    return known[1]


def _publish(application: str, decisions: Sequence[ScalingDecision]) -> None:
    """Let ingresses, which run in other processes, show the decisions."""
    try:
        private_ray.put_shared(_key_of(application), msgspec.json.encode(decisions))
    except Exception:  # to show them is no condition of scaling
        logger.exception("The autoscaler's decisions cannot be shown.")


def last_decisions(application: str) -> list[ScalingDecision]:
    """The last decisions on an application's pools, oldest first. Waits for Ray."""
    found = private_ray.get_shared(_key_of(application))
    return msgspec.json.decode(found, type=list[ScalingDecision]) if found else []


def _key_of(application: str) -> str:
    return f"scaling/{application}"
