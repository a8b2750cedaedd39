"""Clients that leave, stall or say half of what they mean: nobody else notices, nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.faults.clients import Questions, ask
from tests.faults.oracles import Oracle
from tests.faults.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STREAMS = 40
LONG = 200  # tokens: longer than any client of these stays


async def test_streams_are_dropped_at_random_moments(system: System) -> None:
    """Before the first token, during prefill, hand-over, transfer and decode."""
    rng = random.Random(1)
    oracle, questions = Oracle(system, "crew"), Questions(rng, "crew")
    answers = await asyncio.gather(
        *[
            ask(system.port, questions.next(LONG), leaves_after_s=rng.uniform(0.2, 2.0))
            for _ in range(NUM_STREAMS)
        ]
    )
    assert all(answer.has_left for answer in answers) and any(answer.text for answer in answers)
    oracle.check(answers)


async def test_a_slow_client(system: System) -> None:
    oracle, questions = Oracle(system, "crew"), Questions(random.Random(2), "crew")
    slow = [
        asyncio.create_task(
            ask(system.port, questions.next(LONG), leaves_after_s=3.0, reads_nbytes=1024)
        )
        for _ in range(4)
    ]
    others = [asyncio.create_task(ask(system.port, questions.next())) for _ in range(8)]
    answers = await asyncio.gather(*others)
    assert all(answer.finish_reason for answer in answers)
    oracle.check([*answers, *await asyncio.gather(*slow)])


async def test_half_a_request(system: System) -> None:
    """Clients that never finish what they ask hold a connection, and no worker."""
    questions = Questions(random.Random(3), "crew")
    oracle = Oracle(system, "crew")
    halves = []
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", system.port)
        whole = questions.next().to_http("127.0.0.1")
        writer.write(whole[: len(whole) // 2])
        halves.append(writer)
    answers = await asyncio.gather(*[ask(system.port, questions.next()) for _ in range(8)])
    oracle.check_rest()
    for writer in halves:
        writer.transport.abort()
    assert all(answer.finish_reason for answer in answers)
