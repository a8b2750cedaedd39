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
        down, port = RedisDown(victim), victim.port
        async with suffered(down):
            with pytest.raises(NoEffect):
                RedisDown(other).verify(0.2)
        assert victim.port == port
        with pytest.raises(NoEffect):
            down.verify(0.2)


WORKER_FAULTS: dict[str, Callable[[Member], Fault]] = {
    "cut": Cut,
    "late": lambda member: Late(member, 0.01),
    "dropped": lambda member: BadFrames(member, "drop"),
    "doubled": lambda member: BadFrames(member, "double"),
    "swapped": lambda member: BadFrames(member, "swap"),
    "post": lambda member: BadTransfers(member, "post"),
    "progress": lambda member: BadTransfers(member, "progress"),
    "notify": lambda member: BadTransfers(member, "notify"),
    "hung": HungTransfers,
    "full disk": FullDisk,
}


@pytest.mark.parametrize("make", WORKER_FAULTS.values(), ids=list(WORKER_FAULTS))
async def test_a_worker_is_hit_and_another_is_not(
    system: System, make: Callable[[Member], Fault]
) -> None:
    victim, other = system.members("crew", "decode")[:2]
    elsewhere = make(other)
    questions = Questions(random.Random(0), "crew")
    async with load(system.port, questions, 16.0) as running, suffered(make(victim)):
        with pytest.raises(NoEffect):
            await asyncio.to_thread(elsewhere.verify, WAIT_S)
    await running.answers()
