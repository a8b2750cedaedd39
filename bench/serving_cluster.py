"""Ray Serve with our application, until standard input ends.

    python -m bench.serving_cluster --port 8000 [--haproxy]

`bench.serving_path` starts it. Serve reads its switches from the environment when it is imported,
so each mode needs a process of its own. Prints `ready` when the application runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from disagg.app.haproxy import haproxy_environment
from disagg.config import HttpConfig, ServeConfig
from disagg.config_checks import parse_config

MODEL = "demo-small"  # for its tokenizer
START_TIMEOUT_S = 120.0


def config_for(port: int) -> ServeConfig:
    return parse_config(
        {
            "tiers": [{"model": MODEL, "prefill": {"num_replicas": 0}}],
            "http": {"port": port},
            "transport": "local",
            "cold_tier_nbytes": 0,
            "cluster_key": "bench",
            "link_host": "127.0.0.1",
            "drain_s": 0,
        }
    )


def serve_until_told(port: int, scratch: Path) -> None:
    from ray import serve

    from bench.paced_replica import PacedReplica
    from disagg.app.build import build_application
    from disagg.app.cluster import APPLICATION, Cluster

    config = config_for(port)
    cluster = Cluster(None, scratch)
    try:
        cluster.connect()
        cluster.start(config.http)
        serve.run(build_application(config, PacedReplica), name=APPLICATION, route_prefix="/")
        cluster.wait(lambda pools: None, START_TIMEOUT_S, threading.Event())
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--haproxy", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        scratch = Path(directory)
        if arguments.haproxy:
            os.environ.update(haproxy_environment(scratch / "h", HttpConfig()))
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        serve_until_told(arguments.port, scratch)


if __name__ == "__main__":
    main()
