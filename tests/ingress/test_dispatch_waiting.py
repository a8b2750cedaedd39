"""Requests that wait for a worker or for room: how long, and what ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from disagg.api.http.metrics import ApiMetrics
from disagg.errors import (
    DeadlineExceeded,
    Overloaded,
    Unavailable,
)
from disagg.ingress import request_state
from disagg.messages import GenerateRequest
from disagg.router.fleet import Fleet
from disagg.router.policy import choose_route
from disagg.router.route import Route
from tests.deltas import answers
from tests.links.fakes import until
from tests.router.fakes import make_fleet, make_record, make_request, make_status
from tests.router.scripted_workers import (
    Clock,
    Script,
    ScriptedWorkers,
    assert_complete,
    assert_nothing_reserved,
    collect,
    keep_busy,
    make_dispatcher,
    play,
)


async def test_nobody_there_at_first_is_refused_at_once() -> None:
    workers = ScriptedWorkers()
    with pytest.raises(Unavailable):
        await collect(make_dispatcher(workers, Fleet(), patience_s=1e9), make_request())
    assert workers.calls == []


@pytest.mark.parametrize(
    ("after", "patience_s"), [(0, 60.0), (10, 0.0)], ids=["patient", "begun, beyond all patience"]
)
async def test_a_request_waits_for_a_replacement_of_the_only_worker(
    after: int, patience_s: float
) -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after)])), make_fleet("d0")
    workers.on_failure = fleet.worker_lost
    request = make_request()
    dispatcher = make_dispatcher(workers, fleet, patience_s=patience_s)
    task = asyncio.create_task(collect(dispatcher, request))
    await until(lambda: not fleet.view().workers)
    await asyncio.sleep(0.1)
    assert not task.done()
    fleet.worker_synced(make_record("d0", epoch=2), [], make_status())
    assert_complete(await task, request)


async def test_waiting_for_a_replacement_ends() -> None:
    """Early where nothing has been said: the client may ask again somewhere else."""
    workers, fleet = ScriptedWorkers(deque([Script(after=0)])), make_fleet("d0")
    workers.on_failure = fleet.worker_lost
    with pytest.raises(Unavailable):
        await collect(make_dispatcher(workers, fleet, patience_s=0.1), make_request())


async def test_a_request_that_all_workers_are_too_full_for_is_refused() -> None:
    """Each is asked once. The client hears how long the queues are, not how long a pause is."""
    full = Script(after=0, then=Overloaded("Full."))
    workers, fleet = ScriptedWorkers(deque([full, full])), make_fleet("d0", "d1")
    for worker_id in ("d0", "d1"):
        status = make_status(num_waiting=9, num_uncomputed_tokens=100_000)
        fleet.worker_stepped(worker_id, (), status)
    with pytest.raises(Overloaded) as refused:
        await collect(make_dispatcher(workers, fleet), make_request())
    assert sorted(call.worker_id for call in workers.calls) == ["d0", "d1"]
    assert refused.value.retry_after_s > 10
    assert_nothing_reserved(fleet)


async def test_a_request_that_has_begun_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than any number of failures would let it go on."""
    monkeypatch.setattr(request_state, "MOST_PAUSE_S", 0.01)
    full = Script(after=0, then=Overloaded("Full."))
    workers = await play(make_request(), make_fleet("d0"), Script(after=3), *[full] * 20)
    assert [call.worker_id for call in workers.calls] == ["d0"] * 22


async def test_a_stuck_worker_has_what_is_left_until_the_deadline() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=2, then="stuck")])), make_fleet("d0")
    now = Clock()()
    got: list[int] = []
    with pytest.raises(DeadlineExceeded):
        request = make_request(deadline_unix_s=now + 0.1)
        async for delta in answers(make_dispatcher(workers, fleet), request):
            got += delta.token_ids
    assert len(got) == 2
    (call,) = workers.calls
    assert 0 < call.timeout_s <= 0.1
    assert_nothing_reserved(fleet)


async def test_the_deadline_holds_while_waiting_for_a_worker() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=2)])), make_fleet("d0")
    workers.on_failure = fleet.worker_lost
    request = make_request(deadline_unix_s=Clock()() + 0.1)
    with pytest.raises(DeadlineExceeded):
        await collect(make_dispatcher(workers, fleet, patience_s=0.0), request)


async def test_a_request_that_comes_too_late_is_refused_once() -> None:
    workers, fleet = ScriptedWorkers(), keep_busy(make_fleet("d0"), "d0")
    fleet.worker_stepped("d0", (), make_status(num_waiting=9, num_uncomputed_tokens=1_000_000))
    metrics = ApiMetrics()
    dispatcher = make_dispatcher(workers, fleet, metrics=metrics)
    with pytest.raises(Overloaded):
        await collect(dispatcher, make_request(ttft_slo_s=0.5))
    assert not workers.calls and "disagg_request_moves_total{" not in metrics.expose().decode()


async def test_a_request_that_was_taken_in_is_not_refused_when_it_moves() -> None:
    fleet = make_fleet("d0", "d1")

    def fill(worker_id: str) -> None:
        fleet.worker_lost(worker_id)
        (other,) = fleet.view().workers
        fleet.worker_stepped(other, (), make_status(num_waiting=9, num_uncomputed_tokens=1_000_000))

    await play(make_request(ttft_slo_s=0.5), fleet, Script(after=2), on_failure=fill)


async def test_those_that_wait_for_a_worker_set_out_in_order_and_look_only_then() -> None:
    """They looked every 50 ms each: a thousand of them took the loop for themselves."""
    num = 5
    workers = ScriptedWorkers(deque(Script(after=2) for _ in range(num)))
    fleet = make_fleet("d0")
    looks: list[str] = []
    requests = [make_request(request_id=f"r{number}") for number in range(num)]
    workers.on_failure = fleet.worker_lost

    def choose(request: GenerateRequest, *arguments: Any) -> Route:
        looks.append(request.request_id)
        return choose_route(request, *arguments)

    dispatcher = make_dispatcher(workers, fleet, patience_s=1e9, choose=choose)
    tasks = [asyncio.create_task(collect(dispatcher, request)) for request in requests]
    await until(lambda: not fleet.view().workers)
    await asyncio.sleep(0.2)
    looks.clear()
    await asyncio.sleep(0.2)
    assert looks == [], "nothing has changed"
    waiting = [call.request.request_id for call in workers.calls]
    tasks[1].cancel()
    await asyncio.sleep(0)
    fleet.worker_synced(make_record("d1"), [], make_status(accepting=False))
    await asyncio.sleep(0.05)
    assert looks == []
    fleet.worker_stepped("d1", (), make_status())
    answers = [await task for number, task in enumerate(tasks) if number != 1]
    for number, answer in zip((0, 2, 3, 4), answers, strict=True):
        assert_complete(answer, requests[number])
    assert sorted(waiting) == [f"r{number}" for number in range(num)]
    order = [call.request.request_id for call in workers.calls[num:]]
    assert order == [name for name in waiting if name != "r1"] and looks == order
    assert not dispatcher._queue._line("toy").unserved
    assert_nothing_reserved(fleet)
