"""A worker pulls a prefix from another before it prefills, and what happens if that fails."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from disagg.api.http.metrics import ApiMetrics
from disagg.errors import DisaggError, Overloaded, Unavailable, WorkerLost
from disagg.ingress import dispatch
from disagg.messages import GenerateRequest, StepCosts
from disagg.router.fleet import Fleet
from tests.router.fakes import COSTS, make_fleet, make_record, make_request, make_status
from tests.router.scripted_workers import (
    Script,
    ScriptedWorkers,
    assert_complete,
    assert_nothing_reserved,
    collect,
    make_dispatcher,
    play,
    prefix_ticket_of,
)


def having_prefix(request: GenerateRequest, *worker_ids: str) -> Fleet:
    """d1 holds the prompt, and has much to do; d0 is near it and free."""
    fleet = make_fleet("d0", "d1", *worker_ids, held={"d1": list(request.block_hashes)})
    fleet.worker_stepped("d1", (), make_status(num_waiting=9, num_uncomputed_tokens=20_000))
    return fleet


async def test_a_prefix_is_pulled_before_it_is_needed() -> None:
    request, workers = make_request(1600), ScriptedWorkers()
    fleet = having_prefix(request)
    metrics = ApiMetrics()
    dispatcher = make_dispatcher(workers, fleet, metrics=metrics)
    assert_complete(await collect(dispatcher, request), request)
    granted = 'disagg_prefix_pulls_total{model_name="toy",outcome="granted"} 1.0'
    assert granted in metrics.expose().decode()
    asked, visit = workers.calls
    assert (asked.worker_id, asked.hand_over, asked.ticket) == ("d1", True, None)
    assert asked.request.token_ids == ()
    assert asked.request.block_hashes == request.block_hashes[:-1]  # its last token is computed
    assert (visit.worker_id, visit.hand_over) == ("d0", False)
    assert visit.ticket == prefix_ticket_of(asked).ticket
    assert visit.request == request
    assert workers.released == []  # who pulls says so to the source itself
    assert workers.introduced == [("d0", "d1")]
    (decision,) = dispatcher.decision(request.request_id)
    assert (decision.route.prefix_source, decision.route.num_cached_tokens) == ("d1", 1584)
    assert_nothing_reserved(fleet)


async def test_a_decode_worker_pulls_a_prefix_from_a_prefill_worker() -> None:
    request = make_request(1600)
    fleet = make_fleet("p0", "d0", held={"p0": list(request.block_hashes)})
    fleet.worker_stepped("p0", (), make_status(num_waiting=9, num_uncomputed_tokens=20_000))
    asked, visit = (await play(request, fleet)).calls
    assert (asked.worker_id, visit.worker_id, visit.hand_over) == ("p0", "d0", False)
    assert visit.ticket == prefix_ticket_of(asked).ticket


async def test_a_worker_that_prefills_for_another_may_pull_a_prefix_from_it() -> None:
    """With a TPOT SLO: d0 is fast and has the streams, the others are too slow for any."""
    request = make_request(2000, tpot_slo_s=0.0125, ttft_slo_s=2.0)
    slow = StepCosts(tuple(3.0 * each for each in COSTS.coefficients), 100, 0.05)
    fleet = Fleet(tpot_slo_s={"toy": 0.0125})
    has = make_status(
        num_running=17, num_context_tokens=17_000, num_waiting=2, num_uncomputed_tokens=2000
    )
    fleet.worker_synced(make_record("d0"), request.block_hashes[:100], has)
    fleet.worker_synced(make_record("p0"), [], make_status(step_costs=slow))
    asked, prefill, decode = calls = (await play(request, fleet)).calls
    assert [each.worker_id for each in calls] == ["d0", "p0", "d0"]
    assert asked.request.token_ids == () and prefill.ticket == prefix_ticket_of(asked).ticket
    assert prefill.hand_over and not decode.hand_over
    assert decode.ticket not in (None, prefill.ticket)


@pytest.mark.parametrize("then", [Unavailable("Evicted."), "lost", "vanish"])
async def test_without_a_prefix_pull_all_is_computed(then: str | DisaggError) -> None:
    request, workers = make_request(1600), ScriptedWorkers(deque([Script(after=0, then=then)]))
    fleet = having_prefix(request)
    metrics = ApiMetrics()
    dispatcher = make_dispatcher(workers, fleet, max_moves=0, metrics=metrics)
    assert_complete(await collect(dispatcher, request), request)
    refused = 'disagg_prefix_pulls_total{model_name="toy",outcome="refused"} 1.0'
    assert refused in metrics.expose().decode()
    assert [(call.worker_id, call.ticket) for call in workers.calls] == [("d1", None), ("d0", None)]
    assert len(dispatcher.decision(request.request_id)) == 1
    assert_nothing_reserved(fleet)


async def test_a_prefix_source_that_has_left_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    request, workers = make_request(1600), ScriptedWorkers()
    run = workers.run

    async def run_on_those_left(worker_id: str, *args: Any, **kwargs: Any) -> None:
        if worker_id == "d1":
            raise WorkerLost("Worker d1 has left the fleet.")
        await run(worker_id, *args, **kwargs)

    monkeypatch.setattr(workers, "run", run_on_those_left)
    dispatcher = make_dispatcher(workers, having_prefix(request), max_moves=0)
    assert_complete(await collect(dispatcher, request), request)
    assert [(call.worker_id, call.ticket) for call in workers.calls] == [("d0", None)]


async def test_nobody_waits_long_for_a_prefix_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PREFIX_PULL_PATIENCE_S", 0.01)
    request = make_request(1600)
    workers = await play(request, having_prefix(request), Script(after=0, then="stuck"))
    assert [call.ticket for call in workers.calls] == [None, None]


async def test_a_prefix_ticket_that_was_not_used_is_given_back() -> None:
    """Who moves chooses again, perhaps without a prefix pull."""
    request = make_request(1600)
    full = Script(after=0, then=Overloaded("No room."))
    workers = await play(request, having_prefix(request), Script(), full)
    asked, refused, good = workers.calls
    assert refused.ticket == prefix_ticket_of(asked).ticket
    assert workers.released == [refused.ticket]
    assert (good.worker_id, good.ticket) == ("d1", None)


async def test_a_client_that_leaves_gives_the_prefix_ticket_back() -> None:
    request = make_request(1600)
    workers = ScriptedWorkers(deque([Script(), Script(after=0, then="stuck")]))
    fleet = having_prefix(request)
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), request))
    await workers.stuck.wait()
    task.cancel()
    await asyncio.wait([task])
    assert workers.released == [prefix_ticket_of(workers.calls[0]).ticket]
    assert_nothing_reserved(fleet)
