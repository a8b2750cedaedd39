"""Configuration -> Serve application: one ingress in front of two worker pools per tier.

serve run disagg.app.build:build --...      or `import_path: disagg.app.build:build` in YAML
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from disagg.app import autoscaling
from disagg.app.deployments import WorkerReplica
from disagg.app.gpus import gpus_of_cluster, nodes_of_cluster
from disagg.app.ingress import Ingress
from disagg.app.rank_actors import placement
from disagg.config import AutoscalingConfig, PoolConfig, ServeConfig, TierConfig
from disagg.config_checks import check_secrets, filled_in, parse_config
from disagg.errors import StartupError
from disagg.messages import Role
from disagg.planner.device_plan import plan_devices, unsized_tiers, with_devices
from disagg.planner.node_check import check_nodes
from disagg.router.autoscale import pools

log = logging.getLogger(__name__)

HEALTH_CHECK_PERIOD_S = 2.0  # Serve notices a dead replica at its next check; links notice at once
HEALTH_CHECK_TIMEOUT_S = 10.0
DRAIN_MARGIN_S = 5.0  # for Serve, on top of our own limits
# An update starts a replica before it stops the old one, except if a worker needs a device of its
# own: Serve would wait for a free device for ever.
SURGE_PERCENT = 100
# Failures to start after which Serve gives up on a pool; a restarted controller starts again at 0.
MAX_NUM_STARTS = 3
INGRESS_MAX_ONGOING_REQUESTS = 4096  # Serve's default of 5 would be the bottleneck


def build(args: dict[str, Any]) -> Application:
    """Serve's builder function.

    Args:
        args: `config.ServeConfig` as plain data. A text `env:NAME` stands for an environment
            variable of the process that builds, so that no file needs to hold a secret.

    Raises:
        StartupError: names the key or the variable at fault.
    """
    raw = filled_in(args, os.environ)
    config = parse_config(raw)
    check_secrets(config)
    if any(pool.num_gpus is None for tier in config.tiers for _, pool in pools(tier)):
        # All GPUs, not only free ones: during an update the old workers still hold some.
        plan = plan_devices(config, gpus_of_cluster(only_free=False), unsized_tiers(raw, config))
        log.info(plan.line)
        if ray.is_initialized():
            check_nodes(plan.config, nodes_of_cluster())
        return build_application(plan.config)
    # Not checked against the nodes: nodes with GPUs may be added when workers ask for them.
    return build_application(with_devices(config, has_gpus=False))


def build_application(
    config: ServeConfig,
    worker: type[WorkerReplica] = WorkerReplica,
) -> Application:
    """The application's graph.

    Args:
        worker: what each replica of a pool is.
    """
    _check_limits(config)
    workers = [
        _worker_pool(config, tier, role, pool, worker)
        for tier in config.tiers
        for role, pool in pools(tier)
        if pool.num_replicas > 0 or pool.autoscaling is not None
    ]
    ingress = serve.deployment(
        name=autoscaling.INGRESS,
        **_size(config, _reporting(config), config.num_ingress),
        max_ongoing_requests=INGRESS_MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        # A stream cannot move between ingresses: it may take as long as requests may.
        graceful_shutdown_timeout_s=config.http.default_timeout_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=SURGE_PERCENT,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress))
    return ingress.bind(config, *workers)


def _check_limits(config: ServeConfig) -> None:
    """Refuse limits that several ingresses cannot share: each would grant them in full."""
    limited = [name for name, tenant in config.tenants.items() if tenant.is_limited]
    if limited and config.num_ingress > 1 and config.redis_url is None:
        raise StartupError(
            f"The limits of {', '.join(sorted(limited))} hold for {config.num_ingress} ingresses"
            " together, which share what has been used through Redis; set redis_url.",
            param="redis_url",
        )


def _reporting(config: ServeConfig) -> AutoscalingConfig | None:
    """An autoscaling configuration that never changes the ingresses, but makes Serve ask them for
    their load."""
    if not autoscaling.is_scaled(config):
        return None
    return AutoscalingConfig(min_replicas=config.num_ingress, max_replicas=config.num_ingress)


def _size(config: ServeConfig, limits: AutoscalingConfig | None, number: int) -> dict[str, Any]:
    """The number of replicas, or the first number of an autoscaled pool."""
    if limits is not None:
        first = min(number, limits.max_replicas)
        options = autoscaling.serve_options(config, limits.min_replicas, first, limits.max_replicas)
        return {"autoscaling_config": options}
    return {"num_replicas": number}


def _worker_pool(
    config: ServeConfig,
    tier: TierConfig,
    role: Role,
    pool: PoolConfig,
    worker: type[WorkerReplica],
) -> Application:
    deployment = serve.deployment(
        name=autoscaling.deployment_name(tier.name, role),
        **_size(config, pool.autoscaling, pool.num_replicas + pool.num_standby),
        max_ongoing_requests=1000,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=0 if pool.num_gpus or pool.resources else SURGE_PERCENT,
        max_constructor_retry_count=MAX_NUM_STARTS,
        request_router_config={
            "request_router_class": "disagg.app.routing.MembershipRouter",
        },
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": (pool.num_gpus or 0) / tier.num_nodes(pool),
            "resources": pool.resources,
        },
        **placement(tier, pool),
    )(worker)
    return deployment.bind(config, tier.name, role)
