"""Under load, with a fault: every request is answered, with the right text, and nothing is left.

The load goes to real replicas over Ray, links, NIXL and Redis; only the model is a fake, whose
tokens depend on every byte of KV. `Oracle` says what is checked after each fault.
"""

from __future__ import annotations

import asyncio
import random

import psutil
import pytest

from tests.faults.clients import Answer, Questions, ask, load
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
    RedisDown,
    suffered,
)
from tests.faults.oracles import Oracle
from tests.faults.relay import Fate
from tests.faults.system import Member, System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RATE = 8.0  # requests a second
BEFORE_S, MEANWHILE_S = 1.0, 2.0
LONG = 200  # tokens of a stream that is to be under way when something happens


async def busiest(system: System, model: str, role: str) -> Member:
    """A worker that has streams right now: whoever hits an idle one proves nothing."""
    while True:
        num_streams = await asyncio.to_thread(system.num_streams, model, role)
        found = max(num_streams, key=lambda member: num_streams[member], default=None)
        if found is not None and num_streams[found]:
            return found
        await asyncio.sleep(0.05)


async def answered_under(
    system: System, fault: Fault, seed: int, model: str = "crew"
) -> list[Answer]:
    """All answers of a load in the middle of which the fault happens."""
    async with load(system.port, Questions(random.Random(seed), model), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        async with suffered(fault):
            await asyncio.sleep(MEANWHILE_S)
            await running.answers()
    return await running.answers()


def assert_all_answered(answers: list[Answer]) -> None:
    failed = [(each.status, each.error, each.trouble) for each in answers if not each.finish_reason]
    assert not failed, f"{len(failed)} of {len(answers)} failed: {failed[:5]}"


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_is_killed(system: System, role: str) -> None:
    oracle = Oracle(system, "crew")
    moves = system.counters().get("disagg_request_moves_total", 0.0)
    async with load(system.port, Questions(random.Random(1), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        victim = (await busiest(system, "crew", role)).process
        async with suffered(Killed(victim)):
            await asyncio.sleep(MEANWHILE_S)
    answers = await running.answers()
    assert_all_answered(answers)
    system.wait_whole()
    oracle.check(answers, [victim])
    if role == "decode":  # the busiest prefill worker may have ended its last prompt just then
        assert system.counters()["disagg_request_moves_total"] > moves


async def test_the_only_worker_is_killed(system: System) -> None:
    """What it was doing goes on where Serve starts another."""
    oracle, questions = Oracle(system, "lone"), Questions(random.Random(2), "lone")
    streams = [asyncio.create_task(ask(system.port, questions.next(LONG))) for _ in range(8)]
    victim = (await busiest(system, "lone", "decode")).process
    async with suffered(Killed(victim)):
        answers = await asyncio.gather(*streams)
    assert_all_answered(answers)
    system.wait_whole()
    oracle.check(answers, [victim])


async def test_a_worker_freezes(system: System) -> None:
    """All is answered while it is frozen still, and what it says when it wakes up hurts nobody."""
    oracle, questions = Oracle(system, "crew"), Questions(random.Random(3), "crew")
    streams = [asyncio.create_task(ask(system.port, questions.next(LONG))) for _ in range(12)]
    victim = (await busiest(system, "crew", "decode")).process
    async with suffered(Frozen(victim)):
        answers = await asyncio.gather(*streams)
        answers += await asyncio.gather(*[ask(system.port, questions.next()) for _ in range(12)])
    assert_all_answered(answers)
    system.wait_whole()
    oracle.check(answers, [victim])


async def test_redis_is_killed_and_comes_back(system: System) -> None:
    oracle = Oracle(system, "crew")
    answers = await answered_under(system, RedisDown(system.redis), seed=4)
    assert_all_answered(answers)
    oracle.check(answers)


async def test_redis_freezes(system: System) -> None:
    oracle = Oracle(system, "crew")
    answers = await answered_under(system, Frozen(psutil.Process(system.redis.pid)), seed=5)
    assert_all_answered(answers)
    oracle.check(answers)


async def test_a_worker_is_cut_off(system: System) -> None:
    """No byte passes between it and the ingress, and no connection ends."""
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(6), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        victim = await busiest(system, "crew", "decode")
        async with suffered(Cut(victim)):
            await running.answers()
    answers = await running.answers()
    assert_all_answered(answers)
    system.wait_whole()
    oracle.check(answers, [victim.process])


@pytest.mark.parametrize("fate", ["drop", "double", "swap"])
async def test_frames_go_astray(system: System, fate: Fate) -> None:
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(7), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        victim = await busiest(system, "crew", "decode")
        async with suffered(BadFrames(victim, fate)):
            await asyncio.sleep(MEANWHILE_S)
    answers = await running.answers()
    assert_all_answered(answers)
    oracle.check(answers)


async def test_frames_are_late(system: System) -> None:
    oracle = Oracle(system, "crew")
    late = Late(system.members("crew", "decode")[0], 0.1)
    answers = await answered_under(system, late, seed=8)
    assert_all_answered(answers)
    oracle.check(answers)


@pytest.mark.parametrize("kind", ["post", "progress", "notify"])
async def test_transfers_fail(system: System, kind: str) -> None:
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(9), "crew"), RATE) as running:
        for member in system.members("crew", "decode"):
            async with suffered(BadTransfers(member, kind, times=2)):
                pass
    answers = await running.answers()
    assert_all_answered(answers)
    oracle.check(answers)


async def test_transfers_hang(system: System) -> None:
    oracle = Oracle(system, "crew")
    hung = HungTransfers(system.members("crew", "decode")[0])
    answers = await answered_under(system, hung, seed=10)
    assert_all_answered(answers)
    oracle.check(answers)


async def test_the_disk_is_full(system: System) -> None:
    oracle = Oracle(system, "crew")
    full = FullDisk(system.members("crew", "decode")[0])
    answers = await answered_under(system, full, seed=11)
    assert_all_answered(answers)
    oracle.check(answers)
