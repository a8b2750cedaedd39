"""Serve's controller and Ray's head away, under load: requests go on from what was known last.

The head's state is in a Redis of its own, so that a new head process finds it, as in a cluster
with `RAY_REDIS_ADDRESS`. `CONTROL_PLANE_AWAY_S` makes the time away longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from disagg.cli.embedded_redis import find_redis_server
from disagg.cli.ports import free_port
from tests.faults.clients import Answer, Questions, load
from tests.faults.faults import Fault, Frozen, Killed, suffered
from tests.faults.oracles import Oracle
from tests.faults.system import Pool, System, running_system

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CREW = Pool("crew", num_prefill=1, num_decode=2)
RATE = 3.0  # requests a second
AWAY_S = float(os.environ.get("CONTROL_PLANE_AWAY_S", "10"))


class HeadDown(Fault):
    """The GCS is killed; healed by another one on the same address and the same Redis."""

    def __init__(self, head: psutil.Process) -> None:
        self._head = head
        self._command, self._environment = head.cmdline(), head.environ()
        self._successor: subprocess.Popen[bytes] | None = None

    def inject(self) -> None:
        self._head.kill()

    def is_in_effect(self) -> bool:
        return Killed(self._head).is_in_effect()

    def heal(self) -> None:
        if self._successor is None:
            self._successor = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def end(self) -> None:
        if self._successor is not None:
            self._successor.kill()
            self._successor.wait()


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


@pytest.fixture(scope="module")
def heads() -> Iterator[list[HeadDown]]:
    """Faults whose successors must live until the system has been stopped."""
    faults: list[HeadDown] = []
    yield faults
    for fault in faults:
        fault.end()


@pytest.fixture(scope="module")
def system(heads: list[HeadDown], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with (
        redis_for_ray(tmp_path_factory.mktemp("redis")) as address,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("RAY_REDIS_ADDRESS", address)
        environment.setenv("RAY_GCS_SERVER_PORT", str(free_port()))  # the same for its successor
        environment.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        with running_system(CREW) as running:
            yield running


def process_named(system: System, part: str) -> psutil.Process:
    (found,) = [
        each
        for each in system.root.children(recursive=True)
        if part in each.name() or part in " ".join(each.cmdline()[:1])
    ]
    return found


async def answered_without(system: System, fault: Fault, seed: int) -> list[Answer]:
    """Answers to a load while nobody replaces a worker that is killed in the middle of it."""
    victim = system.members("crew", "decode")[0].process
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(seed), "crew"), RATE) as running:
        await asyncio.sleep(1)
        async with suffered(fault):
            await asyncio.sleep(AWAY_S / 2)
            async with suffered(Killed(victim)):
                await asyncio.sleep(AWAY_S / 2)
    answers = await running.answers()
    failed = [(each.status, each.error, each.trouble) for each in answers if not each.finish_reason]
    assert not failed, f"{len(failed)} of {len(answers)} failed: {failed[:5]}"
    await asyncio.to_thread(system.wait_whole)  # no worker too few, and none too many
    oracle.check(answers, [victim])
    return answers


async def test_the_controller_is_killed(system: System) -> None:
    controller = process_named(system, "ServeController")
    await answered_without(system, Killed(controller), seed=1)
    assert process_named(system, "ServeController").pid != controller.pid


async def test_the_controller_freezes(system: System) -> None:
    await answered_without(system, Frozen(process_named(system, "ServeController")), seed=2)


async def test_the_head_is_killed_and_comes_back(system: System, heads: list[HeadDown]) -> None:
    heads.append(HeadDown(process_named(system, "gcs_server")))
    await answered_without(system, heads[0], seed=3)
