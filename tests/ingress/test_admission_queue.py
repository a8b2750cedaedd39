"""Requests that wait for a turn, through the dispatcher, on a fleet whose load is set by hand."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any
from unittest import mock

import pytest

from disagg.errors import DeadlineExceeded, Overloaded
from disagg.ingress.admission_queue import REQUEST_NBYTES, TOKEN_NBYTES, AdmissionQueue, ModelQueue
from disagg.ingress.dispatch import Dispatcher
from disagg.messages import GenerateRequest, TokenDelta
from disagg.router import admission
from disagg.router.fair_queue import FairQueue, Waiter
from disagg.router.fleet import Fleet
from disagg.router.route import Candidate, Route
from tests.deltas import answers
from tests.router.fakes import make_fleet, make_record, make_request, make_status
from tests.router.scripted_workers import Script, ScriptedWorkers

BUSY = make_status(num_uncomputed_tokens=20_000, num_waiting=8)  # for some 2.5 s
NOW = 1000.0


class Ingress:
    """A dispatcher with one worker. Time stands where the test puts it."""

    def __init__(self, slo_s: float = 60.0, **options: object) -> None:
        self.now = NOW
        self._slo_s = slo_s
        self.waited: list[tuple[str, float]] = []
        self.fleet: Fleet = make_fleet("d0")
        self.workers = ScriptedWorkers()
        self.admission_queue = AdmissionQueue(
            self.fleet,
            now=lambda: self.now,
            waited=lambda *each: self.waited.append(each),
            **options,  # type: ignore[arg-type]
        )
        self.dispatcher = Dispatcher(
            self.workers,
            self.fleet,
            now=lambda: self.now,
            rng=random.Random(1),
            admission_queue=self.admission_queue,
        )

    def load(self, busy: bool) -> None:
        self.fleet.worker_stepped("d0", (), BUSY if busy else make_status())

    @property
    def served(self) -> list[str]:
        return [call.request.request_id for call in self.workers.calls]

    def ask(self, name: str, tenant: str = "", **changes: object) -> asyncio.Task[list[TokenDelta]]:
        fields = {"request_id": name, "tenant": tenant, "ttft_slo_s": self._slo_s} | changes
        request = make_request(**fields)  # type: ignore[arg-type]
        return asyncio.create_task(self._collect(request))

    async def _collect(self, request: GenerateRequest) -> list[TokenDelta]:
        async with aclosing(answers(self.dispatcher, request)) as deltas:
            return [delta async for delta in deltas]

    async def until_waiting(self, num: int) -> None:
        while sum(self.admission_queue.num_by_tenant().values()) != num:  # noqa: ASYNC110
            await asyncio.sleep(0)


def busy_ingress(**options: Any) -> Ingress:
    ingress = Ingress(**options)
    ingress.load(busy=True)
    return ingress


async def test_nobody_waits_where_workers_have_room() -> None:
    ingress = Ingress()
    answers = await asyncio.gather(ingress.ask("a"), ingress.ask("b"))
    assert [len(each) for each in answers] == [64, 64]
    assert ingress.served == ["a", "b"]
    assert ingress.waited == []
    assert ingress.dispatcher.decision("a")[0].queued is None


async def test_who_waits_goes_when_there_is_room_and_in_a_fair_order() -> None:
    ingress = busy_ingress()
    tasks = [ingress.ask(f"flood-{number}", "flood") for number in range(3)]
    tasks += [ingress.ask("mine", "calm"), ingress.ask("first", "flood", priority=-1)]
    await ingress.until_waiting(5)
    assert ingress.served == []
    assert ingress.admission_queue.num_by_tenant() == {"flood": 4, "calm": 1}
    assert ingress.admission_queue.nbytes == 5 * (REQUEST_NBYTES + 100 * TOKEN_NBYTES)
    assert ingress.fleet.view().queued["toy"] == 5
    assert ingress.admission_queue.num_uncomputed_tokens("toy") == 500
    ingress.now += 2.0
    ingress.load(busy=False)
    await asyncio.gather(*tasks)
    assert ingress.served == ["first", "mine", "flood-0", "flood-1", "flood-2"]
    assert (ingress.admission_queue.nbytes, ingress.admission_queue.num_by_tenant()) == (0, {})
    assert ingress.fleet.view().queued["toy"] == 0
    assert ingress.admission_queue.num_uncomputed_tokens("toy") == 0
    assert ("calm", 2.0) in ingress.waited
    queued = ingress.dispatcher.decision("mine")[0].queued
    assert queued is not None
    assert (queued.tenant, queued.priority, queued.num_before) == ("calm", 0, 3)
    assert queued.waited_s == 2.0


async def test_who_comes_while_others_wait_does_not_pass_them_by() -> None:
    """It waits though there is room again, until the queue looks."""
    ingress = busy_ingress()
    with mock.patch.object(ingress.admission_queue, "_release_later"):
        first = ingress.ask("first")
        await ingress.until_waiting(1)
        ingress.load(busy=False)
        second = ingress.ask("second")
        await ingress.until_waiting(2)
    ingress.admission_queue._release_later()
    await asyncio.gather(first, second)
    assert ingress.served == ["first", "second"]


async def test_a_waiter_that_is_cancelled_leaves_nothing() -> None:
    ingress = busy_ingress()
    tasks = [ingress.ask(f"{number}") for number in range(4)]
    await ingress.until_waiting(4)
    for task in tasks[:3]:
        task.cancel()
    await asyncio.wait(tasks[:3])
    assert ingress.admission_queue.nbytes == REQUEST_NBYTES + 100 * TOKEN_NBYTES
    ingress.load(busy=False)
    await tasks[3]
    assert ingress.served == ["3"]
    assert ingress.admission_queue.nbytes == 0
    assert not ingress.fleet.view().workers["d0"].num_decoding  # no reservation is left


@pytest.mark.parametrize("is_cancelled_first", [False, True])
async def test_a_waiter_whose_turn_comes_while_it_is_cancelled_reserves_nothing(
    is_cancelled_first: bool,
) -> None:
    ingress = busy_ingress()
    task = ingress.ask("a")
    await ingress.until_waiting(1)
    ingress.load(busy=False)
    if is_cancelled_first:
        task.cancel()
    ingress.admission_queue._release_waiting()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not ingress.fleet.view().workers["d0"].num_decoding
    assert ingress.admission_queue.num_by_tenant() == {}


async def test_who_would_come_too_late_is_refused_at_once_with_the_time_to_come_back() -> None:
    ingress = busy_ingress(slo_s=10.0)
    tasks = [ingress.ask(f"{number}", num_tokens=4000) for number in range(40)]
    refusals: list[Overloaded] = []
    while len(refusals) + sum(ingress.admission_queue.num_by_tenant().values()) < len(tasks):
        await asyncio.sleep(0)
        refusals = [
            error
            for task in tasks
            if task.done() and isinstance(error := task.exception(), Overloaded)
        ]
    assert 0 < len(refusals) < len(tasks)
    assert all(0.0 < each.retry_after_s < 60.0 for each in refusals)
    calm = ingress.ask("calm", "calm")
    ingress.load(busy=False)
    await calm  # the flood does not take its time
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_who_has_waited_for_too_long_is_refused() -> None:
    ingress = Ingress()
    busy = make_status(num_uncomputed_tokens=2_400, num_waiting=1)
    ingress.fleet.worker_stepped("d0", (), busy)
    with pytest.raises(Overloaded, match="for as long as") as caught:
        # Its deadline leaves what the busy worker needs, and a moment.
        await ingress.ask("a", deadline_unix_s=NOW + 0.5)
    assert caught.value.retry_after_s >= 0.0
    assert ingress.admission_queue.nbytes == 0


async def test_a_deadline_that_passes_in_the_queue_is_told_as_one() -> None:
    ingress = busy_ingress()
    task = ingress.ask("a", deadline_unix_s=NOW + 30.0)
    await ingress.until_waiting(1)
    ingress.now += 40.0
    with pytest.raises(DeadlineExceeded):
        await task


async def test_where_bytes_run_out_whoever_has_the_most_of_them_gives_way() -> None:
    each_nbytes = REQUEST_NBYTES + 100 * TOKEN_NBYTES
    ingress = busy_ingress(max_nbytes=4 * each_nbytes)
    flood = [ingress.ask(f"flood-{number}", "flood") for number in range(5)]
    await ingress.until_waiting(4)
    with pytest.raises(Overloaded, match="is full"):
        await flood[4]
    calm = [ingress.ask(f"calm-{number}", "calm") for number in range(3)]
    with pytest.raises(Overloaded, match="is full"):
        await flood[3]
    with pytest.raises(Overloaded, match="is full"):
        await flood[2]
    with pytest.raises(Overloaded, match="is full"):
        await calm[2]
    assert ingress.admission_queue.num_by_tenant() == {"flood": 2, "calm": 2}
    assert ingress.admission_queue.nbytes == 4 * each_nbytes
    ingress.load(busy=False)
    await asyncio.gather(*flood[:2], *calm[:2])
    assert ingress.admission_queue.nbytes == 0


async def test_where_bytes_run_out_nobody_gives_way_to_an_equal() -> None:
    """Or two tenants would push each other out for ever."""
    ingress = busy_ingress(max_nbytes=3 * (REQUEST_NBYTES + 100 * TOKEN_NBYTES))
    first = [ingress.ask(f"first-{number}", "first") for number in range(2)]
    await ingress.until_waiting(2)
    second = [ingress.ask(f"second-{number}", "second") for number in range(2)]
    with pytest.raises(Overloaded, match="is full"):
        await second[1]
    assert ingress.admission_queue.num_by_tenant() == {"first": 2, "second": 1}
    ingress.load(busy=False)
    await asyncio.gather(*first, second[0])


async def test_a_flood_on_one_model_does_not_refuse_the_others() -> None:
    """Also not where both are the same tenant's."""
    each_nbytes = REQUEST_NBYTES + 100 * TOKEN_NBYTES
    ingress = busy_ingress(max_nbytes=4 * each_nbytes)
    ingress.fleet.worker_synced(make_record("d1", model="other"), (), BUSY)
    flood = [ingress.ask(f"flood-{number}") for number in range(4)]
    await ingress.until_waiting(4)
    calm = [ingress.ask(f"calm-{number}", model="other") for number in range(3)]
    for number in (3, 2):
        with pytest.raises(Overloaded, match="is full"):
            await flood[number]
    with pytest.raises(Overloaded, match="is full"):
        await calm[2]
    assert ingress.fleet.view().queued == {"toy": 2, "other": 2}
    ingress.load(busy=False)
    ingress.fleet.worker_stepped("d1", (), make_status())
    await asyncio.gather(*flood[:2], *calm[:2])
    assert ingress.admission_queue.nbytes == 0


async def test_a_request_that_loses_its_worker_does_not_wait_again() -> None:
    ingress = Ingress()
    ingress.fleet.worker_synced(make_record("d1"), (), make_status())
    ingress.workers.scripts.append(Script(after=3, then="lost"))

    def everybody_is_busy(worker_id: str) -> None:
        for name in ("d0", "d1"):
            ingress.fleet.worker_stepped(name, (), BUSY)

    ingress.workers.on_failure = everybody_is_busy
    answer = await ingress.ask("a")
    assert sum(len(each.token_ids) for each in answer) == 64
    assert len(ingress.workers.calls) == 2
    assert ingress.waited == []


async def test_waiters_of_a_fleet_that_is_gone_wait_for_another() -> None:
    ingress = busy_ingress()
    task = ingress.ask("a")
    await ingress.until_waiting(1)
    ingress.fleet.worker_lost("d0")
    ingress.admission_queue._release_waiting()
    assert not task.done()
    ingress.fleet.worker_synced(make_record("d1"), (), make_status())
    await task
    assert [call.worker_id for call in ingress.workers.calls] == ["d1"]


def test_a_tenant_pays_for_what_it_took() -> None:
    """Its prompt in seconds, and each token of its answer."""
    ingress = Ingress()
    view = ingress.fleet.view()
    request = make_request(1000, max_tokens=500, tenant="a")
    route = ingress.dispatcher._choose_route(
        request, view, ingress.fleet.index, NOW, random.Random(1)
    )
    charge = ingress.admission_queue.charge(request, route)
    assert charge.num_expected == 128  # the usual length
    assert charge.cost_s == pytest.approx(route.chosen.own_s + 128 * charge.token_s)
    queue = ingress.admission_queue._line("toy")
    ingress.admission_queue.pass_by(charge)
    ingress.admission_queue.end(charge, 500)
    total_s = route.chosen.own_s + 500 * charge.token_s
    assert queue._tenants["a"].served_s == pytest.approx(total_s)


@pytest.mark.parametrize(("least_share", "is_learned"), [(0.05, True), (0.3, False)])
async def test_how_late_first_tokens_are_is_learned_from_long_waits(
    least_share: float, is_learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that was predicted to be far below the SLO teaches nothing of waits near it."""
    monkeypatch.setattr(admission, "LEAST_SHARE", least_share)
    ingress = Ingress(slo_s=6.0)
    tokens = ingress.fleet.first_tokens["toy"]
    await ingress.ask("at once", num_tokens=4000)
    assert tokens.error_s == 0.0 and tokens.own_s > 0.0
    ingress.load(busy=True)
    tasks = [
        ingress.ask("first", num_tokens=4000),
        ingress.ask("second"),
    ]
    await ingress.until_waiting(2)
    ingress.now += 5.0  # far longer than was predicted
    ingress.load(busy=False)
    await asyncio.gather(*tasks)
    assert (tokens.error_s > 0.0) is is_learned


@pytest.mark.parametrize("beside_s", [0.0, 0.4])
def test_a_worker_without_a_queue_has_room_for_a_prompt_that_streams_make_longer(
    beside_s: float,
) -> None:
    ways = (Candidate(None, "d0", 0.5, 0.4, 0.9, 1.0, 0, None, beside_s),)
    route = Route(None, "d0", 0.9, 0, ways, "")
    has_room = Ingress().admission_queue.with_room("toy", route) is route
    assert has_room == (beside_s > 0.0), "0.4 s of other prompts are a queue"


async def test_a_wall_clock_that_is_set_does_not_make_a_queue_slow() -> None:
    ingress = busy_ingress(slo_s=6000.0)
    tasks = [ingress.ask("first", num_tokens=8000), ingress.ask("second")]
    await ingress.until_waiting(2)
    ingress.load(busy=False)
    await ingress.until_waiting(1)  # the first one fills the worker
    ingress.now += 3600.0
    await asyncio.gather(*tasks)
    assert ingress.served == ["first", "second"]
    assert ingress.admission_queue._queues["toy"].seconds(1.0, 1) < 2.0


# How fast a queue moves


COST_S = 0.05
NUM_WORKERS = 2


class Waiting:
    """A queue that never ends. Its requests leave when the test says so."""

    def __init__(self) -> None:
        self.line = ModelQueue(lambda tenant: 1.0)
        self.now = 1000.0
        queue: FairQueue[Waiter] = self.line  # type: ignore[assignment]
        self.line.starts_waiting()
        queue.push(Waiter("", COST_S, 1))
        self.line.record_departure(COST_S, self.now, NUM_WORKERS)

    def leave(self, number: int, each_s: float, paused_s: float = 0.0) -> None:
        for _ in range(number):
            self.now += each_s
            self.line.pause(paused_s)
            self.line.record_departure(COST_S, self.now, NUM_WORKERS)

    def of_model(self, cost_s: float = 14.0, num_workers: int = NUM_WORKERS) -> float:
        """The predicted seconds, as a multiple of what the time model says."""
        return self.line.seconds(cost_s, num_workers) / (cost_s / num_workers)


def test_before_any_has_left_workers_take_as_long_as_the_time_model_says() -> None:
    assert Waiting().of_model() == 1.0


def test_the_few_that_leave_while_a_burst_is_read_say_little_of_all_others() -> None:
    waiting = Waiting()
    waiting.leave(9, 0.25)  # ten times as long as predicted, while a client sends 200 requests
    assert 1.0 < waiting.of_model() < 1.5


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_speed_is_learned(factor: float) -> None:
    waiting = Waiting()
    waiting.leave(3000, factor * COST_S / NUM_WORKERS)
    assert waiting.of_model() == pytest.approx(factor, rel=0.02)


def test_seconds_in_which_the_ingress_does_nothing_are_not_those_of_workers() -> None:
    waiting = Waiting()
    waiting.leave(100, 0.5 + COST_S / NUM_WORKERS, paused_s=0.5)
    assert waiting.of_model() == pytest.approx(1.0)


def test_more_workers_are_faster_at_once() -> None:
    waiting = Waiting()
    waiting.leave(3000, 3.0 * COST_S / NUM_WORKERS)
    assert waiting.line.seconds(14.0, 4) == pytest.approx(0.5 * waiting.line.seconds(14.0, 2))
