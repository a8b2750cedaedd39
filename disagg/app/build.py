"""Builds the Serve application from a configuration: ingresses, and two worker pools per tier.

Use it with `import_path: disagg.app.build:build` in a YAML file of Ray Serve.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from disagg.api_keys import MIN_KEY_LENGTH, can_be_guessed
from disagg.app import autoscaling, private_ray
from disagg.app.deployments import WorkerReplica
from disagg.app.gpus import gpus_of_cluster, nodes_of_cluster
from disagg.app.ingress import Ingress
from disagg.app.rank_actors import placement
from disagg.capacity.device_plan import plan_devices, unsized_tiers, with_devices
from disagg.capacity.node_check import LEAST_CPUS, check_nodes
from disagg.config import AutoscalingConfig, PoolConfig, ServeConfig, TierConfig
from disagg.config_checks import check_secrets, filled_in, parse_config
from disagg.errors import StartupError
from disagg.messages import Role

log = logging.getLogger(__name__)

HEALTH_CHECK_PERIOD_S = 2.0  # only Serve waits for a check; links notice a dead worker at once
HEALTH_CHECK_TIMEOUT_S = 10.0
DRAIN_MARGIN_S = 5.0  # added to our own limits to get Serve's
# An update starts new replicas before it stops the old ones, except for workers with a device, as
# Serve would wait for a free device for ever.
SURGE_PERCENT = 100
# Number of failed starts after which Serve gives up on a pool. A restarted controller counts anew.
MAX_NUM_STARTS = 3
INGRESS_MAX_ONGOING_REQUESTS = 4096  # Serve's default of 5 would be the bottleneck


def build(args: dict[str, Any]) -> Application:
    """Serve's builder function.

    Args:
        args: `config.ServeConfig` as plain data. A string `env:NAME` is replaced by an environment
            variable of this process, so that no file needs to contain a secret.

    Raises:
        StartupError: a setting is invalid or an environment variable is missing.
    """
    raw = filled_in(args, os.environ)
    config = parse_config(raw)
    check_secrets(config)
    if config.http.is_open and not config.insecure:
        log.warning(
            "This server has no API key: any client that reaches its port can use it. Set"
            " http.api_key, or insecure: true to end this warning."
        )
    elif not config.insecure and any(can_be_guessed(key) for _, key in config.http.named_keys()):
        log.warning(
            "An API key has fewer than %d characters: clients that reach the port can guess it."
            " `openssl rand -hex 32` makes a good one; insecure: true ends this warning.",
            MIN_KEY_LENGTH,
        )
    if any(pool.num_gpus is None for tier in config.tiers for pool in tier.pools.values()):
        # All GPUs, not only free ones: during an update the old workers still hold some.
        plan = plan_devices(config, gpus_of_cluster(only_free=False), unsized_tiers(raw, config))
        log.info(plan.line)
        if ray.is_initialized():
            check_nodes(plan.config, nodes_of_cluster())
        return build_application(plan.config)
    # The nodes are not checked: Ray may add nodes with GPUs when workers request them.
    return build_application(with_devices(config, has_gpus=False))


def build_application(
    config: ServeConfig,
    worker: type[WorkerReplica] = WorkerReplica,
    version: str | None = None,
) -> Application:
    """Build the application from a validated configuration.

    Args:
        worker: class of the replicas of all pools.
        version: version of the ingress for Serve; None lets Serve make one.
    """
    _check_limits(config)
    workers = [
        _worker_pool(config, tier, role, pool, worker)
        for tier in config.tiers
        for role, pool in tier.pools.items()
        if pool.num_replicas > 0 or pool.autoscaling is not None
    ]
    ingress = serve.deployment(
        name=autoscaling.INGRESS,
        **_size(config, _reporting(config), config.num_ingress),
        max_ongoing_requests=INGRESS_MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        # A stream cannot move to another ingress, so it gets the full time of a request.
        graceful_shutdown_timeout_s=config.http.default_timeout_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=SURGE_PERCENT,
        # Not 0: Ray would also place it on a head node without CPUs, and its streams end there.
        ray_actor_options={"num_cpus": LEAST_CPUS},
    )(serve.ingress()(Ingress))
    return private_ray.with_version(ingress, version).bind(config, *workers)


def _check_limits(config: ServeConfig) -> None:
    """Refuse limits of tenants if several ingresses have no Redis to share them."""
    limited = [name for name, tenant in config.tenants.items() if tenant.is_limited]
    if limited and config.num_ingress > 1 and config.redis_url is None:
        raise StartupError(
            f"The limits of {', '.join(sorted(limited))} apply to {config.num_ingress} ingresses"
            " together, which count requests in Redis; set redis_url, or use one ingress.",
            param="redis_url",
        )


def _reporting(config: ServeConfig) -> AutoscalingConfig | None:
    """An autoscaling configuration with a constant size, which makes Serve read ingress reports."""
    if not autoscaling.is_scaled(config):
        return None
    return AutoscalingConfig(min_replicas=config.num_ingress, max_replicas=config.num_ingress)


def _size(config: ServeConfig, limits: AutoscalingConfig | None, number: int) -> dict[str, Any]:
    """Serve's options for the number of replicas; `number` is the first one of a scaled pool."""
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
        **_size(config, pool.autoscaling, pool.num_replicas),
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
