"""Two ingresses behind HAProxy: one dies, a worker that stands by takes over, all are updated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.faults.clients import Answer, Questions, ask, load
from tests.faults.faults import Killed, suffered
from tests.faults.oracles import Oracle
from tests.faults.system import Member, Pool, System, running_system, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CREW = Pool("crew", num_prefill=1, num_decode=1, num_standby=1, token_s=0.0003)
RATE = 4.0  # requests a second
BEFORE_S = 1.0  # of load
NUM_STREAMS = 16
LONG = 600  # tokens of streams that a fault is to hit
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[System]:
    with running_system(CREW, num_ingress=2) as running:
        yield running


@pytest.fixture
def system(shared: System) -> System:
    shared.wait_whole()
    return shared


def assert_all_answered(answers: list[Answer]) -> None:
    failed = [(each.status, each.error, each.trouble) for each in answers if not each.finish_reason]
    assert not failed, f"{len(failed)} of {len(answers)} failed: {failed[:5]}"


def num_streams(system: System) -> int:
    """On all workers."""
    return sum(state["num_streams"] for state in system.states("crew"))


async def test_an_ingress_is_killed(system: System) -> None:
    """Its streams are cut, as they must be; nobody else's are, and workers drop them at once."""
    oracle, questions = Oracle(system, "crew"), Questions(random.Random(1), "crew")
    (victim, of_victim), (_, of_other) = system.ingress_urls().items()

    def num_running(url: str) -> int:
        return int(system.counters_of(url)["disagg_num_requests_running"])

    asked = [ask(system.port, questions.next(LONG)) for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(each) for each in asked]
    await asyncio.to_thread(until, lambda: num_streams(system) == NUM_STREAMS, TIMEOUT_S)
    num_hit = num_running(of_victim)
    async with suffered(Killed(victim)):
        await asyncio.to_thread(
            until, lambda: num_streams(system) <= NUM_STREAMS - num_hit, TIMEOUT_S
        )
        assert num_running(of_other) == NUM_STREAMS - num_hit > 0, "the others ran on meanwhile"
        more = await asyncio.gather(*[ask(system.port, questions.next()) for _ in range(8)])
    answers = await asyncio.gather(*streams)
    assert_all_answered(more)
    cut = [each for each in answers if each.trouble]
    assert len(cut) == num_hit > 0
    assert all(each.question.expected.startswith(each.text) for each in cut)
    system.wait_whole()
    oracle.check([*more, *(each for each in answers if not each.trouble)], [victim])


async def test_who_stands_by_takes_over(system: System) -> None:
    oracle, questions = Oracle(system, "crew"), Questions(random.Random(2), "crew")
    asked = [ask(system.port, questions.next(LONG)) for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(each) for each in asked]
    decode: dict[Member, int] = {}
    while not any(decode.values()):
        decode = await asyncio.to_thread(system.num_streams, "crew", "decode")
    serving, standing_by = sorted(decode, key=lambda member: decode[member], reverse=True)
    assert not decode[standing_by], "it stands by"
    victim = serving.process
    async with suffered(Killed(victim)):
        # Before Serve could have started anybody: by then the requests are there.
        await asyncio.to_thread(until, lambda: standing_by.state()["num_streams"] > 0, TIMEOUT_S)
        answers = await asyncio.gather(*streams)
    assert_all_answered(answers)
    system.wait_whole()
    oracle.check(answers, [victim])


async def test_all_are_updated(system: System) -> None:
    pids = {each.pid for each in system.ingresses()} | {each.pid for each in system.members("crew")}
    async with load(system.port, Questions(random.Random(3), "crew"), RATE) as running:
        await asyncio.sleep(BEFORE_S)
        await asyncio.to_thread(system.deploy_again)
        await asyncio.to_thread(system.wait_whole)
    assert_all_answered(await running.answers())
    system.wait_whole()
    now = {each.pid for each in system.ingresses()} | {each.pid for each in system.members("crew")}
    assert len(now) == len(pids) and not now & pids, "some process is still the old one"
