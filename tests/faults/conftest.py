"""One running system for all tests here: starting one is the most expensive part of them.

Two ingresses behind HAProxy, and three tiers, each for tests of its own. It ends with the last of
them, before anybody else starts a cluster.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disagg.cli.embedded_redis import find_redis_server
from disagg.host import free_port
from tests.faults.faults import HeadDown
from tests.faults.system import Pool, System, running_system

# Few blocks, so that caches overflow, requests wait, and prefixes come back from the store; and
# tokens that take their time, so that prompts are worth computing elsewhere.
CREW = Pool(
    "crew",
    num_prefill=2,
    num_decode=2,
    engine=(("num_gpu_blocks_override", 512),),
    step_s=0.02,
    token_s=0.0006,
)
QUICK = {"start_s": 5, "look_back_s": 5, "down_after_s": 3}
# Its prefill workers follow the load.
BURSTS = Pool(
    "bursts",
    num_prefill=1,
    num_decode=1,
    token_s=0.003,
    settings=(
        ("ttft_slo_s", 20.0),
        (
            "prefill",
            {
                "num_replicas": 1,
                "autoscaling": {
                    "min_replicas": 1,
                    "max_replicas": 2,
                    "slo_fraction": 0.1,
                    **QUICK,
                },
            },
        ),
    ),
)
# One worker for all, asleep soon after the start, and as often as nobody asks.
NAPS = Pool(
    "naps",
    num_prefill=0,
    num_decode=1,
    engine=(("block_size", 16),),
    settings=(
        (
            "decode",
            {
                "num_replicas": 1,
                "autoscaling": {
                    "min_replicas": 0,
                    "max_replicas": 1,
                    **QUICK,
                    "down_after_s": 20,
                },
            },
        ),
    ),
)


@contextmanager
def redis_for_ray(directory: Path) -> Iterator[str]:
    """Its address. Nothing is ever evicted from it, unlike from one that keeps KV blocks."""
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    with subprocess.Popen(
        [find_redis_server(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture(scope="package")
def heads() -> Iterator[list[HeadDown]]:
    """Faults whose successors must live until the system has been stopped."""
    faults: list[HeadDown] = []
    yield faults
    for fault in faults:
        fault.end()


@pytest.fixture(scope="package")
def shared_system(
    heads: list[HeadDown], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """The head's state is in a Redis of its own, so that a new head process finds it, as in a
    cluster with `RAY_REDIS_ADDRESS`."""
    with (
        redis_for_ray(tmp_path_factory.mktemp("redis")) as address,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("RAY_REDIS_ADDRESS", address)
        environment.setenv("RAY_GCS_SERVER_PORT", str(free_port()))  # the same for its successor
        environment.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        environment.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")  # instead of 0.1
        with running_system(CREW, BURSTS, NAPS, num_ingress=2) as system:
            yield system


@pytest.fixture
def system(shared_system: System) -> System:
    """Whole again, whatever the test before did to it."""
    shared_system.wait_whole()
    return shared_system
