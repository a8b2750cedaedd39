"""Pools that follow the load over Ray: a burst scales one out and in again, another one wakes.

First of the tests of the system that they share: a pool falls asleep during the burst to another.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from tests import plain_http
from tests.faults.clients import Questions, ask, load
from tests.faults.faults import Killed, suffered
from tests.faults.oracles import Oracle, assert_answered
from tests.faults.system import System, busiest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RATE = 2.0  # requests a second, of which each takes a prefill worker about a second
CHANGE_TIMEOUT_S = 240.0
LONG = 200  # tokens of a stream that is to be under way when something happens


async def until_size(system: System, model: str, role: str, is_so: Callable[[int], bool]) -> int:
    """Wait until the ingress routes to so many workers of a pool."""
    number = -1
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while not is_so(number):
            await asyncio.sleep(0.2)
            pools = await asyncio.to_thread(system.pools)
            number = pools.get(model, {}).get(f"num_{role}", -1)
    return number


async def test_a_burst_scales_out_and_in_without_a_failed_request(system: System) -> None:
    assert await until_size(system, "bursts", "prefill", lambda number: number >= 1) == 1
    async with load(system.port, Questions(random.Random(1), "bursts"), RATE) as burst:
        await until_size(system, "bursts", "prefill", lambda number: number > 1)
        await asyncio.sleep(2.0)
    assert_answered(await burst.answers())
    async with load(system.port, Questions(random.Random(2), "bursts"), 0.3) as trickle:
        await until_size(system, "bursts", "prefill", lambda number: number == 1)
    assert_answered(await trickle.answers())


async def test_a_request_wakes_a_pool_that_has_no_worker(system: System) -> None:
    await until_size(system, "naps", "decode", lambda number: number == 0)
    ready = await asyncio.to_thread(plain_http.get, f"{system.url}/ready")
    assert ready.status_code == 200
    answer = await ask(system.port, Questions(random.Random(3), "naps").next())
    assert_answered([answer])


async def test_the_only_worker_is_killed(system: System) -> None:
    """Of the pool that is awake now. What it was doing goes on where Serve starts another."""
    oracle, questions = Oracle(system, "naps"), Questions(random.Random(2), "naps")
    streams = [asyncio.create_task(ask(system.port, questions.next(LONG))) for _ in range(8)]
    victim = (await busiest(system, "naps", "decode")).process
    async with suffered(Killed(victim)):
        answers = await asyncio.gather(*streams)
    oracle.check_answered(answers, [victim])
