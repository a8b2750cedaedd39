"""Whatever workers do, the client gets every token once, in order, and exactly one end."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.blocks import hash_blocks
from disagg.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DisaggError,
    EngineFailed,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, TokenDelta, WireError
from disagg.router.dispatch import Dispatcher, grown
from disagg.router.fleet import NUM_STATUSES_UNTIL_SEEN, Fleet, Load
from tests.router.fakes import BLOCK_SIZE, ROOT, make_fleet, make_record, make_request, make_status


def token_at(position: int) -> int:
    """What any correct worker generates at a position: a function of the position only."""
    return 1000 + position


@dataclass
class Call:
    worker_id: str
    request: GenerateRequest
    timeout_s: float
    hand_over: bool
    ticket: KVTicket | None
    is_closed_early: bool = False


@dataclass
class Script:
    """What happens on one visit. Deltas carry up to `tokens_per_delta` tokens.

    `then` happens after `after` tokens of the visit: "lost" (the link ends), "vanish" (the stream
    just stops), "stuck" (no further word) or an error that the worker answers.
    """

    after: int = 1 << 30
    then: str | DisaggError = "lost"
    tokens_per_delta: int = 1
    with_last_tokens: bool = False  # the error comes in the delta of the last tokens


@dataclass
class ScriptedWorkers:
    """Plays one script per visit, then behaves well. Knows whose ticket is good for what."""

    scripts: deque[Script] = field(default_factory=deque)
    calls: list[Call] = field(default_factory=list)
    released: list[KVTicket] = field(default_factory=list)
    on_failure: Callable[[str], None] | None = None

    async def stream(
        self,
        worker_id: str,
        request: GenerateRequest,
        *,
        timeout_s: float,
        hand_over: bool = False,
        ticket: KVTicket | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        call = Call(worker_id, request, timeout_s, hand_over, ticket)
        self.calls.append(call)
        script = self.scripts.popleft() if self.scripts else Script()
        try:
            async with asyncio.timeout(timeout_s):
                async for delta in self._play(call, script):
                    yield delta
        except TimeoutError:
            raise DeadlineExceeded("Too late.") from None
        except GeneratorExit:
            call.is_closed_early = True
            raise

    def release(self, ticket: KVTicket) -> None:
        self.released.append(ticket)

    async def _play(self, call: Call, script: Script) -> AsyncGenerator[TokenDelta, None]:
        request = call.request
        position = len(request.token_ids)
        end = request.num_prompt_tokens + request.sampling.max_tokens
        stop = min(end, position + 1) if call.hand_over else end
        num_left = script.after
        while position < stop:
            await asyncio.sleep(0)
            if num_left <= 0:
                for delta in await self._fail(call, script):
                    yield delta
                return
            count = min(script.tokens_per_delta, num_left, stop - position)
            tokens = tuple(token_at(position + i) for i in range(count))
            position, num_left = position + count, num_left - count
            is_end = position == end
            error = None
            if num_left <= 0 and script.with_last_tokens and isinstance(script.then, DisaggError):
                error = WireError.of(script.then)
            elif call.hand_over and not is_end:
                yield TokenDelta(1, tokens, num_cached_tokens=7)
                yield TokenDelta(1, (), ticket=ticket_of(call.worker_id, request))
                return
            finish = "length" if is_end and error is None else None
            yield TokenDelta(1, tokens, finish, num_cached_tokens=5, error=error)  # type: ignore[arg-type]
            if error is not None:
                return

    async def _fail(self, call: Call, script: Script) -> list[TokenDelta]:
        if self.on_failure is not None:
            self.on_failure(call.worker_id)
        if isinstance(script.then, DisaggError):
            return [TokenDelta(1, (), error=WireError.of(script.then))]
        if script.then == "vanish":
            return []
        if script.then == "stuck":
            await asyncio.Event().wait()
        raise WorkerLost(f"Worker {call.worker_id} was lost.")


def ticket_of(worker_id: str, request: GenerateRequest) -> KVTicket:
    num_tokens = len(request.token_ids)
    return KVTicket(request.request_id, worker_id, 1, "toy/bs16", num_tokens, (0,), (0,))


class Clock:
    """Unix time as far as a dispatcher is concerned; follows the running loop."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()


def make_dispatcher(workers: ScriptedWorkers, fleet: Fleet, **options: Any) -> Dispatcher:
    options = {"patience_s": 0.2} | options
    rng = random.Random(3)
    return Dispatcher(workers, fleet, now=Clock(), rng=rng, **options)


def keep_busy(fleet: Fleet, *worker_ids: str) -> Fleet:
    """Make decode workers too busy to prefill for themselves."""
    for worker_id in worker_ids:
        status = make_status(num_running=16, num_context_tokens=16_000)
        fleet.worker_stepped(worker_id, (), status)
    return fleet


async def collect(dispatcher: Dispatcher, request: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in dispatcher.generate(request)]


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def assert_complete(deltas: list[TokenDelta], request: GenerateRequest) -> None:
    start, count = request.num_prompt_tokens, request.sampling.max_tokens
    assert tokens_of(deltas) == [token_at(start + i) for i in range(count)]
    assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason == "length"
    assert all(delta.ticket is None and delta.error is None for delta in deltas)
    assert all(delta.num_cached_tokens == 0 for delta in deltas[1:])


def assert_nothing_reserved(fleet: Fleet) -> None:
    for worker_id in fleet.view().workers:
        assert fleet._ledger.coming_to(worker_id) == Load()


async def test_all_on_one_worker() -> None:
    workers, fleet, request = ScriptedWorkers(), make_fleet("d0"), make_request(100)
    deltas = await collect(make_dispatcher(workers, fleet), request)
    assert_complete(deltas, request)
    assert deltas[0].num_cached_tokens == 5
    assert [(call.worker_id, call.hand_over) for call in workers.calls] == [("d0", False)]
    assert_nothing_reserved(fleet)


async def test_prefill_hands_its_first_token_and_ticket_to_decode() -> None:
    workers, fleet = ScriptedWorkers(), keep_busy(make_fleet("p0", "d0"), "d0")
    request = make_request(2000)
    deltas = await collect(make_dispatcher(workers, fleet), request)
    assert_complete(deltas, request)
    assert deltas[0].num_cached_tokens == 7
    first, second = workers.calls
    assert (first.worker_id, first.hand_over, first.ticket) == ("p0", True, None)
    assert (second.worker_id, second.hand_over) == ("d0", False)
    assert second.ticket == ticket_of("p0", request)
    assert second.request.token_ids == (*request.token_ids, token_at(2000))
    assert second.request.num_prompt_tokens == 2000
    assert_nothing_reserved(fleet)


async def test_an_answer_of_one_token_ends_at_prefill() -> None:
    workers, fleet = ScriptedWorkers(), keep_busy(make_fleet("p0", "d0"), "d0")
    request = make_request(2000, max_tokens=1)
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    assert [call.worker_id for call in workers.calls] == ["p0"]
    assert_nothing_reserved(fleet)


async def test_a_lost_worker_costs_no_token() -> None:
    workers = ScriptedWorkers(deque([Script(after=20)]))
    fleet, request = make_fleet("d0", "d1"), make_request(100)
    dispatcher = make_dispatcher(workers, fleet)
    assert_complete(await collect(dispatcher, request), request)
    first, second = workers.calls
    assert {first.worker_id, second.worker_id} == {"d0", "d1"}
    assert len(second.request.token_ids) == 120
    hashes = hash_blocks(ROOT, second.request.token_ids, BLOCK_SIZE)
    assert second.request.block_hashes == tuple(hashes)
    decisions = dispatcher.decision("request-0")
    assert [d.route.decode for d in decisions] == [first.worker_id, second.worker_id]
    assert [d.num_tokens for d in decisions] == [100, 120]
    assert decisions[0].because == ""
    assert decisions[1].because.startswith("worker_lost: ")


async def test_a_ticket_goes_on_when_decode_fails_before_its_first_token() -> None:
    failures = [Script(), Script(after=0, then=Overloaded("No room."))]
    workers = ScriptedWorkers(deque(failures))
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")
    request = make_request(2000)
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    prefill, failed, good = workers.calls
    assert prefill.hand_over
    assert failed.ticket == good.ticket == ticket_of("p0", request)
    assert failed.worker_id != good.worker_id


async def test_a_used_ticket_is_not_used_again() -> None:
    workers = ScriptedWorkers(deque([Script(), Script(after=3)]))
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")
    request = make_request(2000)
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    again, last = workers.calls[2:]
    assert (again.hand_over, again.ticket) == (True, None)
    assert last.ticket == ticket_of("p0", again.request)


async def test_a_ticket_of_a_dead_source_is_dropped() -> None:
    workers = ScriptedWorkers(deque([Script(), Script(after=0)]))
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")
    workers.on_failure = lambda worker_id: fleet.worker_lost("p0")
    request = make_request(2000)
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    assert len(workers.calls) == 3
    assert workers.calls[2].ticket is None


async def test_a_restarted_source_does_not_honour_old_tickets() -> None:
    workers = ScriptedWorkers(deque([Script(), Script(after=0)]))
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")
    restarted = make_record("p0", epoch=2)
    workers.on_failure = lambda worker_id: fleet.worker_synced(restarted, [], make_status())
    request = make_request(2000)
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    assert workers.calls[2].ticket is None


async def test_prefill_that_dies_is_done_elsewhere() -> None:
    workers = ScriptedWorkers(deque([Script(after=0)]))
    fleet = keep_busy(make_fleet("p0", "p1", "d0"), "d0")
    request = make_request(2000)
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    first, second, third = workers.calls
    assert {first.worker_id, second.worker_id} == {"p0", "p1"}
    assert third.worker_id == "d0"


async def test_a_final_error_is_not_tried_again() -> None:
    final = ContextLengthExceeded("Too long.")
    workers = ScriptedWorkers(deque([Script(after=4, then=final)]))
    fleet = make_fleet("d0", "d1")
    got: list[int] = []
    with pytest.raises(ContextLengthExceeded, match=r"Too long\."):
        async for delta in make_dispatcher(workers, fleet).generate(make_request()):
            got += delta.token_ids
    assert got == [token_at(100 + i) for i in range(4)]
    assert len(workers.calls) == 1
    assert_nothing_reserved(fleet)


async def test_a_failed_engine_is_left_once_but_a_second_one_makes_the_request_suspect() -> None:
    fleet, request = make_fleet("d0", "d1", "d2"), make_request()
    once = ScriptedWorkers(deque([Script(after=4, then=EngineFailed("A bug."))]))
    assert_complete(await collect(make_dispatcher(once, fleet), request), request)
    twice = ScriptedWorkers(deque([Script(after=4, then=EngineFailed("A bug."))] * 2))
    with pytest.raises(EngineFailed, match=r"A bug\."):
        await collect(make_dispatcher(twice, fleet), request)
    assert len({call.worker_id for call in twice.calls}) == len(twice.calls) == 2


async def test_moves_are_bounded() -> None:
    workers = ScriptedWorkers(deque([Script(after=1)] * 50))
    fleet = make_fleet(*(f"d{i}" for i in range(10)))
    dispatcher = make_dispatcher(workers, fleet, max_moves=3)
    with pytest.raises(WorkerLost):
        await collect(dispatcher, make_request())
    assert len(workers.calls) == 4
    assert len({call.worker_id for call in workers.calls}) == 4
    assert len(dispatcher.decision("request-0")) == 4


async def test_nobody_there_at_first_is_refused_at_once() -> None:
    workers = ScriptedWorkers()
    with pytest.raises(Unavailable):
        await collect(make_dispatcher(workers, Fleet(), patience_s=1e9), make_request())
    assert workers.calls == []


async def test_a_request_waits_for_a_replacement_of_the_only_worker() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=10)])), make_fleet("d0")
    workers.on_failure = fleet.worker_lost
    request = make_request()
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet, patience_s=60), request))
    await asyncio.sleep(0.1)
    assert not task.done()
    fleet.worker_synced(make_record("d0", epoch=2), [], make_status())
    assert_complete(await task, request)


async def test_waiting_for_a_replacement_ends() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=10)])), make_fleet("d0")
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


async def test_a_request_that_has_begun_waits_for_room() -> None:
    full = Script(after=0, then=Overloaded("Full."))
    workers = ScriptedWorkers(deque([Script(after=3), full, full]))
    fleet, request = make_fleet("d0"), make_request()
    assert_complete(await collect(make_dispatcher(workers, fleet), request), request)
    assert [call.worker_id for call in workers.calls] == ["d0"] * 4


async def test_the_length_of_answers_is_learned() -> None:
    workers, fleet = ScriptedWorkers(), make_fleet("d0")
    dispatcher = make_dispatcher(workers, fleet)
    await collect(dispatcher, make_request(max_tokens=20))
    once = fleet.answers.usual("toy")
    assert 20 < once < 128
    await collect(dispatcher, make_request(max_tokens=20))
    assert 20 < fleet.answers.usual("toy") < once


async def test_a_stuck_worker_has_what_is_left_until_the_deadline() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=2, then="stuck")])), make_fleet("d0")
    now = Clock()()
    got: list[int] = []
    with pytest.raises(DeadlineExceeded):
        request = make_request(deadline_unix_s=now + 0.1)
        async for delta in make_dispatcher(workers, fleet).generate(request):
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
        await collect(make_dispatcher(workers, fleet, patience_s=60), request)


async def test_a_request_that_comes_too_late_is_refused_once() -> None:
    workers, fleet = ScriptedWorkers(), keep_busy(make_fleet("d0"), "d0")
    fleet.worker_stepped("d0", (), make_status(num_waiting=9, num_uncomputed_tokens=1_000_000))
    moved: list[str] = []
    dispatcher = make_dispatcher(workers, fleet, ttft_slo_s={"toy": 0.5}, moved=moved.append)
    with pytest.raises(Overloaded):
        await collect(dispatcher, make_request())
    assert (workers.calls, moved) == ([], [])


async def test_a_request_that_was_taken_in_is_not_refused_when_it_moves() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=2)])), make_fleet("d0", "d1")

    def fill(worker_id: str) -> None:
        fleet.worker_lost(worker_id)
        (other,) = fleet.view().workers
        fleet.worker_stepped(other, (), make_status(num_waiting=9, num_uncomputed_tokens=1_000_000))

    workers.on_failure = fill
    request = make_request()
    dispatcher = make_dispatcher(workers, fleet, ttft_slo_s={"toy": 0.5})
    assert_complete(await collect(dispatcher, request), request)


async def test_closing_the_answer_closes_the_stream() -> None:
    workers, fleet = ScriptedWorkers(), make_fleet("d0")
    async with aclosing(make_dispatcher(workers, fleet).generate(make_request())) as deltas:
        await anext(deltas)
    assert workers.calls[0].is_closed_early
    assert_nothing_reserved(fleet)


async def test_a_client_that_leaves_between_two_workers_gives_the_ticket_back() -> None:
    workers, fleet = ScriptedWorkers(), keep_busy(make_fleet("p0", "d0"), "d0")
    request = make_request(2000)
    async with aclosing(make_dispatcher(workers, fleet).generate(request)) as deltas:
        await anext(deltas)  # from the prefill worker
        await anext(deltas)  # from the decode worker, which has used the ticket
    assert [call.hand_over for call in workers.calls] == [True, False]
    assert workers.released == []
    workers.scripts.extend([Script(), Script(after=0, then="stuck")])
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), request))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
    assert workers.released == [ticket_of("p0", request)]


async def test_cancelling_the_reader_is_not_taken_for_a_deadline() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=2, then="stuck")])), make_fleet("d0")
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), make_request()))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_reserved(fleet)


async def test_a_request_counts_on_its_workers_until_they_speak() -> None:
    workers = ScriptedWorkers(deque([Script(after=0, then="stuck")]))
    fleet = keep_busy(make_fleet("p0", "d0"), "d0")
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), make_request(2000)))
    await asyncio.sleep(0.02)
    view = fleet.view().workers
    assert view["p0"].num_uncomputed_tokens == 2000
    assert (view["d0"].num_decoding, view["d0"].num_context_tokens) == (17, 18_000)
    task.cancel()
    await asyncio.wait([task])
    assert_nothing_reserved(fleet)


async def test_old_decisions_are_forgotten() -> None:
    workers, fleet = ScriptedWorkers(), make_fleet("d0")
    dispatcher = make_dispatcher(workers, fleet, max_num_decisions=2)
    for name in ("a", "b", "c"):
        await collect(dispatcher, make_request(request_id=name))
    assert dispatcher.decision("a") == ()
    assert len(dispatcher.decision("b")) == len(dispatcher.decision("c")) == 1


async def test_a_client_that_repeats_an_id_does_not_fill_the_memory() -> None:
    dispatcher = make_dispatcher(ScriptedWorkers(), make_fleet("d0"), max_moves=2)
    for _ in range(10):
        await collect(dispatcher, make_request())
    assert len(dispatcher.decision("request-0")) == 3


async def test_a_request_stops_counting_twice_when_its_worker_reports_it() -> None:
    workers = ScriptedWorkers(deque([Script(after=0, then="stuck")]))
    fleet = make_fleet("d0")
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), make_request(100)))
    await asyncio.sleep(0.02)
    assert fleet.view().workers["d0"].num_uncomputed_tokens == 100
    for _ in range(NUM_STATUSES_UNTIL_SEEN):
        fleet.worker_stepped("d0", (), make_status(num_uncomputed_tokens=100))
    assert fleet.view().workers["d0"].num_uncomputed_tokens == 100
    task.cancel()
    await asyncio.wait([task])


def test_grown_names_the_blocks_that_fill() -> None:
    request = make_request(30)
    tokens = list(range(500, 540))
    bigger = grown(request, tokens, BLOCK_SIZE)
    assert bigger.token_ids == (*request.token_ids, *tokens)
    assert bigger.block_hashes == tuple(hash_blocks(ROOT, bigger.token_ids, BLOCK_SIZE))
    assert grown(grown(request, tokens[:7], BLOCK_SIZE), tokens[7:], BLOCK_SIZE) == bigger
    assert (bigger.num_prompt_tokens, bigger.sampling) == (30, request.sampling)


scripts = st.builds(
    Script,
    after=st.integers(0, 12),
    then=st.sampled_from(
        ["lost", "vanish", Overloaded("Full."), Unavailable("Draining."), WorkerLost("Gone.")]
    ),
    tokens_per_delta=st.integers(1, 5),
    with_last_tokens=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(scripts, max_size=8),
    num_prefill=st.integers(0, 2),
    num_decode=st.integers(1, 3),
    max_tokens=st.integers(1, 40),
    num_prompt=st.sampled_from([1, 15, 16, 17, 800, 2000]),
    dies=st.booleans(),
)
def test_no_failure_repeats_or_loses_a_token(
    script: list[Script],
    num_prefill: int,
    num_decode: int,
    max_tokens: int,
    num_prompt: int,
    dies: bool,
) -> None:
    names = [f"p{i}" for i in range(num_prefill)] + [f"d{i}" for i in range(num_decode)]
    request = make_request(num_prompt, max_tokens=max_tokens)

    async def run() -> tuple[list[TokenDelta], DisaggError | None]:
        fleet = keep_busy(make_fleet(*names), *names[num_prefill:])
        workers = ScriptedWorkers(deque(script))
        if dies and len(names) > len(script):
            workers.on_failure = fleet.worker_lost
        dispatcher = make_dispatcher(workers, fleet, max_moves=4, patience_s=0.0)
        deltas: list[TokenDelta] = []
        try:
            async for delta in dispatcher.generate(request):
                deltas.append(delta)  # noqa: PERF401 - what came before an error counts
        except DisaggError as error:
            return deltas, error
        finally:
            assert_nothing_reserved(fleet)
            for call in workers.calls:
                count = len(call.request.token_ids) // BLOCK_SIZE
                assert len(call.request.block_hashes) == count
        return deltas, None

    deltas, error = asyncio.run(run())
    if error is None:
        assert_complete(deltas, request)
    else:
        assert error.retryable
        got = tokens_of(deltas)
        assert got == [token_at(num_prompt + i) for i in range(len(got))]
        assert not any(delta.is_last for delta in deltas)
