"""The real application on Ray Serve with fake models, until standard input ends.

    python -m tests.faults.cluster_process CONFIG.json

Serve reads its switches from the environment when it is imported, so each cluster needs a process
of its own. Prints `ready` when the application runs, and after each line of standard input:
`deploy` (the same again, which replaces every replica) or `scale DEPLOYMENT NUM_REPLICAS`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from itertools import chain
from pathlib import Path

from disagg.app.haproxy import haproxy_environment
from disagg.cli.ray_environment import DEFAULTS, OF_OUR_RAY
from disagg.config import HttpConfig, ServeConfig
from disagg.config_checks import parse_config

START_TIMEOUT_S = 180.0


def serve_until_told(config: ServeConfig, scratch: Path) -> None:
    from disagg.app.cluster import Cluster

    cluster = Cluster(None, scratch)
    try:
        cluster.connect()
        cluster.start(config.http)
        for line in chain(["deploy"], sys.stdin):
            match line.split():
                case ["deploy"]:
                    deploy(config)
                case ["scale", deployment, num_replicas]:
                    scale(deployment, int(num_replicas))
            cluster.wait(lambda text: None, START_TIMEOUT_S, threading.Event())
            print("ready", flush=True)
    finally:
        cluster.stop()


def deploy(config: ServeConfig) -> None:
    from ray import serve

    from disagg.app.autoscaling import is_scaled
    from disagg.app.build import build_application
    from disagg.app.cluster import APPLICATION
    from tests.faults.fake_replica import FakeReplica

    serve.run_many(
        [
            serve.RunTarget(
                build_application(config, FakeReplica),
                name=APPLICATION,
                route_prefix="/",
                # Serve scales a pool itself or lets others do so.
                external_scaler_enabled=not is_scaled(config),
            )
        ],
        wait_for_applications_running=False,
    )


def scale(deployment: str, num_replicas: int) -> None:
    """As an autoscaler outside of Serve does it."""
    import ray
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    from disagg.app.cluster import APPLICATION

    controller = _get_global_client()._controller
    which = DeploymentID(deployment, APPLICATION)
    ray.get(controller.update_deployment_replicas.remote(which, num_replicas))


def main() -> None:
    config = parse_config(json.loads(Path(sys.argv[1]).read_text()))
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as directory:
        scratch = Path(directory)
        os.environ.update(haproxy_environment(scratch / "h", HttpConfig()))
        for name, value in (DEFAULTS | OF_OUR_RAY).items():  # as `disagg serve` does
            os.environ.setdefault(name, value)
        serve_until_told(config, scratch)


if __name__ == "__main__":
    main()
