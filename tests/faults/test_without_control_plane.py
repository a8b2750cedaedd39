"""Serve's controller and Ray's head away, under load: requests go on from what was known last.

`CONTROL_PLANE_AWAY_S` makes the time away longer. The last tests of the system that they share with
others here, whose head they replace.
"""

from __future__ import annotations

import asyncio
import os
import random

import psutil
import pytest

from tests.e2e.command import is_named
from tests.faults.clients import Questions, load
from tests.faults.faults import Fault, Frozen, HeadDown, Killed, suffered
from tests.faults.oracles import Oracle
from tests.faults.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RATE = 3.0  # requests a second
AWAY_S = float(os.environ.get("CONTROL_PLANE_AWAY_S", "6"))


def process_named(system: System, part: str) -> psutil.Process:
    (found,) = [each for each in system.root.children(recursive=True) if is_named(each, part)]
    return found


async def answered_without(system: System, fault: Fault, seed: int) -> None:
    """Answers to a load while nobody replaces a worker that is killed in the middle of it."""
    victim = system.members("crew", "decode")[0].process
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(seed), "crew"), RATE) as running:
        await asyncio.sleep(1)
        async with suffered(fault):
            await asyncio.sleep(AWAY_S / 2)
            async with suffered(Killed(victim)):
                await asyncio.sleep(AWAY_S / 2)
    oracle.check_answered(await running.answers(), [victim])  # no worker too few, none too many


async def test_the_controller_is_killed(system: System) -> None:
    controller = process_named(system, "ServeController")
    await answered_without(system, Killed(controller), seed=1)
    assert process_named(system, "ServeController").pid != controller.pid


async def test_the_controller_freezes(system: System) -> None:
    await answered_without(system, Frozen(process_named(system, "ServeController")), seed=2)


async def test_the_head_is_killed_and_comes_back(system: System, heads: list[HeadDown]) -> None:
    heads.append(HeadDown(process_named(system, "gcs_server")))
    await answered_without(system, heads[0], seed=3)
