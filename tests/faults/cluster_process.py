"""The real application on Ray Serve with fake models, until standard input ends.

    python -m tests.faults.cluster_process CONFIG.json [--no-haproxy]

Serve reads its switches from the environment when it is imported, so each cluster needs a process
of its own. Prints `ready` when the application runs. Each line of standard input is the path of
another configuration to deploy, answered with `ready` again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

from disagg.cli.serve import haproxy_environment
from disagg.config import ServeConfig, parse_config

START_TIMEOUT_S = 180.0


def serve_until_told(first: ServeConfig, scratch: Path) -> None:
    from ray import serve

    from disagg.app.build import build_application
    from disagg.app.cluster import APPLICATION, Cluster
    from tests.faults.fake_replica import FakeReplica

    cluster = Cluster(None, scratch)

    def deploy(config: ServeConfig) -> None:
        application = build_application(config, FakeReplica)
        serve.run_many(
            [serve.RunTarget(application, name=APPLICATION, route_prefix="/")],
            wait_for_applications_running=False,
        )
        cluster.wait(lambda text: None, START_TIMEOUT_S, threading.Event())
        print("ready", flush=True)

    try:
        cluster.start(first.http)
        deploy(first)
        for line in sys.stdin:
            deploy(read_config(Path(line.strip())))
    finally:
        cluster.stop()


def read_config(path: Path) -> ServeConfig:
    return parse_config(json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--haproxy", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as directory:
        scratch = Path(directory)
        if arguments.haproxy:
            os.environ.update(haproxy_environment(scratch / "h"))
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        serve_until_told(read_config(arguments.config), scratch)


if __name__ == "__main__":
    main()
