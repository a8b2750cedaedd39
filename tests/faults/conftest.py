"""One running system for all fault tests: starting Ray is the most expensive part of them.

It ends with the last of them, before anybody else starts a cluster.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disagg.cli.embedded_redis import find_redis_server
from disagg.cli.ports import free_port
from tests.faults.faults import HeadDown
from tests.faults.system import Pool, System, running_system

# Few blocks, so that caches overflow, requests wait, and prefixes come back from the store; and
# tokens that take their time, so that prompts are worth computing elsewhere.
CREW = Pool(
    "crew", num_prefill=1, num_decode=3, engine=(("num_gpu_blocks_override", 256),), token_s=0.0003
)
LONE = Pool("lone", num_prefill=0, num_decode=1)


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
        with running_system(CREW, LONE) as system:
            yield system


@pytest.fixture
def system(shared_system: System) -> System:
    """Whole again, whatever the test before did to it."""
    shared_system.wait_whole()
    return shared_system
