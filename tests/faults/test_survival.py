"""Under load, with a fault: every request is answered, with the right text, and nothing is left.

The load goes to real replicas over Ray, links, NIXL and Redis; only the model is a fake, whose
tokens depend on every byte of KV. `Oracle` says what is checked after each fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import psutil
import pytest

from tests.faults.clients import Questions, ask, load
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
from tests.faults.system import Member, System, busiest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RATE = 4.0  # requests a second
BEFORE_S, MEANWHILE_S = 0.5, 1.5
LONG = 100  # tokens of a stream that is to be under way when something happens


def decoder(system: System) -> Member:
    return system.members("crew", "decode")[0]


FAULTS: dict[str, Callable[[System], Fault]] = {
    "Redis is killed and comes back": lambda system: RedisDown(system.redis),
    "Redis freezes": lambda system: Frozen(psutil.Process(system.redis.pid)),
    "frames are late": lambda system: Late(decoder(system), 0.1),
    "transfers hang": lambda system: HungTransfers(decoder(system)),
    "the disk is full": lambda system: FullDisk(decoder(system)),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_in_the_middle_of_a_load(system: System, name: str) -> None:
    """Each with prompts of its own, whose KV nobody has yet."""
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(name), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        async with suffered(FAULTS[name](system)):
            await asyncio.sleep(MEANWHILE_S)
            await running.answers()
    oracle.check_answered(await running.answers())


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_is_killed(system: System, role: str) -> None:
    """One of two decode workers, or all prefill workers, beginning with one that has prompts."""
    oracle = Oracle(system, "crew")
    moves = system.counters().get("disagg_request_moves_total", 0.0)
    questions = Questions(random.Random(1), "crew")
    long = [questions.next(LONG) for _ in range(6)]
    async with load(system.port, questions, RATE) as running:
        under_way = [asyncio.create_task(ask(system.port, each)) for each in long]
        await asyncio.sleep(2 * BEFORE_S)
        hit = [await busiest(system, "crew", role)]
        if role == "prefill":
            hit += set(system.members("crew", role)) - {*hit}
        victims = [member.process for member in hit]
        for victim in victims:
            async with suffered(Killed(victim)):
                pass
        await asyncio.sleep(MEANWHILE_S)
    answers = [*await running.answers(), *await asyncio.gather(*under_way)]
    oracle.check_answered(answers, victims)
    if role == "decode":  # prefill workers may have ended their last prompts just then
        assert system.counters()["disagg_request_moves_total"] > moves


async def test_a_worker_freezes(system: System) -> None:
    """All is answered while it is frozen still, and what it says when it wakes up hurts nobody."""
    oracle, questions = Oracle(system, "crew"), Questions(random.Random(3), "crew")
    streams = [asyncio.create_task(ask(system.port, questions.next(LONG))) for _ in range(12)]
    victim = (await busiest(system, "crew", "decode")).process
    async with suffered(Frozen(victim)):
        answers = await asyncio.gather(*streams)
        answers += await asyncio.gather(*[ask(system.port, questions.next()) for _ in range(12)])
    oracle.check_answered(answers, [victim])


async def test_a_worker_is_cut_off(system: System) -> None:
    """No byte passes between it and the ingress, and no connection ends."""
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(6), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        victim = await busiest(system, "crew", "decode")
        async with suffered(Cut(victim)):
            await running.answers()
    oracle.check_answered(await running.answers(), [victim.process])


async def test_frames_go_astray(system: System) -> None:
    """Dropped, doubled, and swapped, each once."""
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(7), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        fates: tuple[Fate, ...] = ("drop", "double", "swap")
        for fate in fates:
            victim = await busiest(system, "crew", "decode")
            async with suffered(BadFrames(victim, fate)):
                pass
        await asyncio.sleep(MEANWHILE_S)
    oracle.check_answered(await running.answers())


async def test_transfers_fail(system: System) -> None:
    """Each kind of call twice, on every decode worker."""
    oracle = Oracle(system, "crew")
    async with load(system.port, Questions(random.Random(9), "crew"), RATE) as running:
        for kind in ("post", "progress", "notify"):
            for member in system.members("crew", "decode"):
                async with suffered(BadTransfers(member, kind, times=2)):
                    pass
    oracle.check_answered(await running.answers())
