"""Configuration -> Serve application: one ingress in front of two worker pools per tier.

serve run disagg.app.build:build --...      or `import_path: disagg.app.build:build` in YAML
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from disagg.app.deployments import WorkerReplica
from disagg.app.ingress import Ingress
from disagg.config import PoolConfig, ServeConfig, TierConfig, parse_config
from disagg.messages import Role

HEALTH_CHECK_PERIOD_S = 2.0  # Serve notices a dead replica at its next check; links notice at once
HEALTH_CHECK_TIMEOUT_S = 10.0
DRAIN_MARGIN_S = 5.0  # for Serve, on top of our own limits
# An update starts a replica before it stops the one that it replaces. Not where a worker needs a
# device of its own: Serve would wait for a free one for ever.
SURGE_PERCENT = 100
MAX_NUM_STARTS = 3  # of a worker, when the application is deployed
INGRESS_MAX_ONGOING_REQUESTS = 4096  # Serve's default of 5 would be the bottleneck

# Spinning OpenMP threads beside other processes cost several times the time of the work itself.
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def build(args: dict[str, Any]) -> Application:
    """Serve's builder function.

    Args:
        args: `config.ServeConfig` as plain data.

    Raises:
        StartupError: names the key at fault.
    """
    return build_application(parse_config(args))


def build_application(
    config: ServeConfig,
    worker: type[WorkerReplica] = WorkerReplica,
    max_num_starts: int = MAX_NUM_STARTS,
) -> Application:
    """The application's graph.

    Args:
        worker: what each replica of a pool is.
        max_num_starts: failures to start after which Serve gives a worker pool up; 1 where a
            person waits for the reason.
    """
    workers = [
        _worker_pool(config, tier, role, pool, worker, max_num_starts)
        for tier in config.tiers
        for role, pool in _pools(tier)
        if pool.num_replicas > 0
    ]
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.num_ingress,
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


def _pools(tier: TierConfig) -> tuple[tuple[Role, PoolConfig], ...]:
    return (("prefill", tier.prefill), ("decode", tier.decode))


def _worker_pool(
    config: ServeConfig,
    tier: TierConfig,
    role: Role,
    pool: PoolConfig,
    worker: type[WorkerReplica],
    max_num_starts: int,
) -> Application:
    environment = dict(WORKER_ENVIRONMENT)
    if tier.engine.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(tier.engine.num_threads)
    deployment = serve.deployment(
        name=f"{tier.name}-{role}",
        num_replicas=pool.num_replicas + pool.num_standby,
        max_ongoing_requests=1000,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=0 if pool.num_gpus or pool.resources else SURGE_PERCENT,
        max_constructor_retry_count=max_num_starts,
        request_router_config={
            "request_router_class": "disagg.app.routing.MembershipRouter",
        },
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "resources": pool.resources,
            "runtime_env": {"env_vars": environment},
        },
    )(worker)
    return deployment.bind(config, tier.name, role)
