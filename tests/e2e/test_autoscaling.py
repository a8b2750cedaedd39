"""Pools that follow the load over Ray: a burst scales one out and in again, another one wakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from tests import plain_http
from tests.faults.clients import Answer, Questions, ask, load
from tests.faults.system import Pool, System, running_system

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RATE = 3.0  # requests a second, of which each takes a prefill worker about half a second
CHANGE_TIMEOUT_S = 240.0
QUICK = {"start_s": 5, "look_back_s": 10, "down_after_s": 5}

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
                "num_standby": 0,
                "autoscaling": {
                    "min_replicas": 1,
                    "max_replicas": 3,
                    "slo_fraction": 0.1,
                    **QUICK,
                },
            },
        ),
    ),
)
# Asleep soon after the start, and as often as nobody asks.
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
                "num_standby": 0,
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


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(BURSTS, NAPS) as running:
        yield running


async def until_size(system: System, model: str, role: str, is_so: Callable[[int], bool]) -> int:
    """Wait until the ingress routes to so many workers of a pool."""
    number = -1
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while not is_so(number):
            await asyncio.sleep(0.2)
            pools = await asyncio.to_thread(system.pools)
            number = pools.get(model, {}).get(f"num_{role}", -1)
    return number


def assert_all_right(answers: list[Answer]) -> None:
    for each in answers:
        assert each.finish_reason is not None, (each.status, each.error, each.trouble)
        assert each.text == each.question.expected


async def test_a_burst_scales_out_and_in_without_a_failed_request(system: System) -> None:
    assert await until_size(system, "bursts", "prefill", lambda number: number >= 1) == 1
    async with load(system.port, Questions(random.Random(1), "bursts"), RATE) as burst:
        await until_size(system, "bursts", "prefill", lambda number: number > 1)
        await asyncio.sleep(2.0)
    assert_all_right(await burst.answers())
    async with load(system.port, Questions(random.Random(2), "bursts"), 0.3) as trickle:
        await until_size(system, "bursts", "prefill", lambda number: number == 1)
    assert_all_right(await trickle.answers())


async def test_a_request_wakes_a_pool_that_has_no_worker(system: System) -> None:
    await until_size(system, "naps", "decode", lambda number: number == 0)
    ready = await asyncio.to_thread(plain_http.get, f"{system.url}/ready")
    assert ready.status_code == 200
    answer = await ask(system.port, Questions(random.Random(3), "naps").next())
    assert_all_right([answer])
