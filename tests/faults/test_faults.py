"""Each fault takes effect on its victim, and a fault aimed elsewhere is found out."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from disagg.cli.embedded_redis import EmbeddedRedis
from tests.faults.clients import Questions, load
from tests.faults.faults import (
    BadFrames,
    BadTransfers,
    Cut,
    Fault,
    Frozen,
    FullDisk,
    HungTransfers,
    Killed,
    Late,
    NoEffect,
    RedisDown,
    suffered,
)
from tests.faults.system import Member, System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RATE = 8.0  # requests a second
WAIT_S = 1.5  # for an effect that must not come; longer than a worker is ever silent


@pytest.fixture
def sleepers() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(process.kill)
            started.append(psutil.Process(process.pid))
        yield started[0], started[1]


@pytest.mark.parametrize("kind", [Killed, Frozen])
async def test_a_process_is_hit_and_another_is_not(
    sleepers: tuple[psutil.Process, psutil.Process], kind: Callable[[psutil.Process], Fault]
) -> None:
    victim, other = sleepers
    async with suffered(kind(victim)):
        with pytest.raises(NoEffect):
            kind(other).verify(0.2)


async def test_a_frozen_process_wakes_up(sleepers: tuple[psutil.Process, psutil.Process]) -> None:
    frozen = Frozen(sleepers[0])
    async with suffered(frozen):
        pass
    with pytest.raises(NoEffect):
        frozen.verify(0.2)


async def test_redis_is_down_and_another_is_not(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a") as victim, EmbeddedRedis(tmp_path / "b") as other:
        down = RedisDown(victim)
        async with suffered(down):
            with pytest.raises(NoEffect):
                RedisDown(other).verify(0.2)
        with pytest.raises(NoEffect):
            down.verify(0.2)


WORKER_FAULTS: tuple[Callable[[Member], Fault], ...] = (
    lambda member: Late(member, 0.01),
    lambda member: BadFrames(member, "drop"),
    lambda member: BadFrames(member, "double"),
    lambda member: BadFrames(member, "swap"),
    lambda member: BadTransfers(member, "post"),
    lambda member: BadTransfers(member, "progress"),
    lambda member: BadTransfers(member, "notify"),
    HungTransfers,
    FullDisk,
    Cut,
)


async def test_a_worker_is_hit_and_another_is_not(system: System) -> None:
    """By one fault after the other; nor is the other one hit later."""
    victim, other = system.members("crew", "decode")
    elsewhere = [make(other) for make in WORKER_FAULTS]

    async def is_not_hit() -> None:
        for each in elsewhere:
            with pytest.raises(NoEffect):
                await asyncio.to_thread(each.verify, 0.0)

    async with load(system.port, Questions(random.Random(0), "crew"), RATE) as running:
        for make in WORKER_FAULTS:
            async with suffered(make(victim)):
                await is_not_hit()
        await asyncio.sleep(WAIT_S)
        await is_not_hit()
    await running.answers()
