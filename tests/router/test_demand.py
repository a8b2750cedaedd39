"""What is asked is counted once, whoever serves it or does not."""

from __future__ import annotations

import asyncio

import pytest

from disagg.errors import DeadlineExceeded, Unavailable
from disagg.ingress.dispatch import Dispatcher
from disagg.router.fleet import Fleet
from disagg.router.load_report import RequestTotals
from tests.router.fakes import make_fleet, make_record, make_request, make_status
from tests.router.scripted_workers import (
    Clock,
    ScriptedWorkers,
    assert_complete,
    collect,
    make_dispatcher,
)


def dispatcher(fleet: Fleet, *wakes: str) -> Dispatcher:
    return make_dispatcher(ScriptedWorkers(), fleet, wakes=wakes, patience_s=0.01)


async def test_requests_and_what_they_hit_are_counted() -> None:
    request = make_request(100)
    fleet = make_fleet("d0", held={"d0": list(request.block_hashes[:2])})
    usual = fleet.answers.usual("toy")
    ours = dispatcher(fleet)
    await collect(ours, request)
    assert ours.demand.of("toy") == RequestTotals(1.0, 100.0, 32.0, usual, 100.0**2)
    await collect(ours, make_request(50, request_id="other"))
    assert ours.demand.of("toy").num_requests == 2.0
    assert ours.demand.of("toy").num_prompt_tokens == 150.0
    assert ours.demand.of("toy").length_variability == pytest.approx(1 / 9)  # 75 +- 25 tokens
    assert ours.demand.of("nobody") == RequestTotals()


async def test_what_could_not_be_served_is_counted_too() -> None:
    ours = dispatcher(Fleet())
    with pytest.raises(Unavailable):
        await collect(ours, make_request(100))
    assert ours.demand.of("toy").num_requests == 1.0


async def test_a_request_waits_for_a_pool_that_it_wakes() -> None:
    fleet = Fleet()
    request = make_request()
    waiting = asyncio.create_task(collect(dispatcher(fleet, "toy"), request))
    await asyncio.sleep(0.1)  # ten times what a request is patient for elsewhere
    assert not waiting.done()
    fleet.worker_synced(make_record("d0"), [], make_status())
    assert_complete(await waiting, request)


async def test_it_waits_until_its_deadline() -> None:
    request = make_request(deadline_unix_s=Clock()() + 0.1)
    with pytest.raises(DeadlineExceeded):
        await collect(dispatcher(Fleet(), "toy"), request)
