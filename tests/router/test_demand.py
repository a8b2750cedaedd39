"""What is asked is counted once, whoever serves it or does not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from disagg.errors import DeadlineExceeded, Unavailable
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, TokenDelta
from disagg.router.demand import Asked
from disagg.router.dispatch import Dispatcher
from disagg.router.fleet import Fleet
from tests.router.fakes import make_fleet, make_record, make_request, make_status


class FakeWorkers:
    """Say one token and end."""

    async def stream(
        self,
        worker_id: str,
        request: GenerateRequest,
        *,
        timeout_s: float,
        hand_over: bool = False,
        ticket: KVTicket | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(1, (7,), "stop")

    def release(self, ticket: KVTicket) -> None:
        raise AssertionError("there was no ticket")


def dispatcher(fleet: Fleet, *wakes: str) -> Dispatcher:
    return Dispatcher(
        FakeWorkers(), fleet, now=time.time, rng=random.Random(0), wakes=wakes, patience_s=0.01
    )


async def answer(of: Dispatcher, request: GenerateRequest) -> list[TokenDelta]:
    async with aclosing(of.generate(request)) as deltas:
        return [delta async for delta in deltas]


async def test_requests_and_what_they_hit_are_counted() -> None:
    request = make_request(100)
    fleet = make_fleet("d0", held={"d0": list(request.block_hashes[:2])})
    usual = fleet.answers.usual("toy")
    ours = dispatcher(fleet)
    await answer(ours, request)
    assert ours.demand.of("toy") == Asked(1.0, 100.0, 32.0, usual)
    await answer(ours, make_request(50, request_id="other"))
    assert ours.demand.of("toy").num_requests == 2.0
    assert ours.demand.of("toy").num_prompt_tokens == 150.0
    assert ours.demand.of("nobody") == Asked()


async def test_what_could_not_be_served_is_counted_too() -> None:
    ours = dispatcher(Fleet())
    with pytest.raises(Unavailable):
        await answer(ours, make_request(100))
    assert ours.demand.of("toy").num_requests == 1.0


async def test_a_request_waits_for_a_pool_that_it_wakes() -> None:
    fleet = Fleet()
    waiting = asyncio.create_task(answer(dispatcher(fleet, "toy"), make_request()))
    await asyncio.sleep(0.1)  # ten times what a request is patient for elsewhere
    assert not waiting.done()
    fleet.worker_synced(make_record("d0"), [], make_status())
    assert [delta.token_ids for delta in await waiting] == [(7,)]


async def test_it_waits_until_its_deadline() -> None:
    request = make_request(deadline_unix_s=time.time() + 0.1)
    with pytest.raises(DeadlineExceeded):
        await answer(dispatcher(Fleet(), "toy"), request)
