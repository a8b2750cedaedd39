"""Whatever workers do, the client gets every token once, in order, and exactly one end."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.running_job import RunningJob
from disagg.blocks import hash_blocks
from disagg.errors import (
    ContextLengthExceeded,
    DisaggError,
    EngineFailed,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from disagg.ingress.request_state import append_tokens
from disagg.messages import Prefetch, PutDelta, StageTimes, Start, TokenDelta
from disagg.router.fleet import NUM_STATUSES_UNTIL_SEEN
from disagg.router.output_length import USUAL_OUTPUT_TOKENS, OutputLengths
from tests.api.fakes import TOKENIZER, request_spec
from tests.deltas import answers
from tests.grids import examples
from tests.router import scripted_workers
from tests.router.fakes import BLOCK_SIZE, ROOT, make_fleet, make_record, make_request, make_status
from tests.router.scripted_workers import (
    Script,
    ScriptedWorkers,
    assert_complete,
    assert_nothing_reserved,
    collect,
    early_ticket_of,
    keep_busy,
    make_dispatcher,
    play,
    ticket_of,
    token_at,
    tokens_of,
)


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
    assert workers.introduced == [("d0", "p0")]
    assert_nothing_reserved(fleet)


async def test_a_decision_tells_what_happened_on_each_worker() -> None:
    script = (
        Script(times=StageTimes(True, 0.25, 0.0, 0.5)),
        Script(times=StageTimes(False, 0.125, 2.0, 1.0, 640, "cma")),
    )
    workers, fleet = ScriptedWorkers(deque(script)), keep_busy(make_fleet("p0", "d0"), "d0")
    dispatcher, request = make_dispatcher(workers, fleet), make_request(2000)
    await collect(dispatcher, request)
    (decision,) = dispatcher.decision(request.request_id)
    prefill, decode = decision.visits
    assert (prefill.worker_id, prefill.num_tokens, prefill.num_cached_tokens) == ("p0", 1, 7)
    assert (prefill.queue_s, prefill.pull_s, prefill.compute_s) == (0.25, 0.0, 0.5)
    assert (decode.worker_id, decode.num_tokens) == ("d0", request.sampling.max_tokens - 1)
    assert (decode.pull_s, decode.pull_nbytes, decode.pull_lane) == (2.0, 640, "cma")
    for visit in decision.visits:
        assert visit.first_token_unix_s is not None and visit.ended_unix_s is not None
        assert decision.unix_s < visit.began_unix_s < visit.first_token_unix_s < visit.ended_unix_s


async def test_what_is_ready_early_goes_to_where_the_request_will_go() -> None:
    workers = ScriptedWorkers(deque([Script(num_early=2)]))
    fleet, request = keep_busy(make_fleet("p0", "d0"), "d0"), make_request(2000)
    deltas = await collect(make_dispatcher(workers, fleet), request)
    assert_complete(deltas, request)
    assert deltas[0].num_cached_tokens == 7 and deltas[0].early_ticket is None
    first, second = workers.calls
    assert workers.prefetched == [
        ("d0", Prefetch(early_ticket_of(first, n), request.block_hashes[:n], request.traceparent))
        for n in (1, 2)
    ]
    assert second.ticket == ticket_of("p0", request)
    assert_nothing_reserved(fleet)


async def test_a_prompt_that_stays_sends_nothing_ahead() -> None:
    """As when a worker that stops lets go of a prompt that it has half computed."""
    workers, fleet, request = ScriptedWorkers(), make_fleet("d0"), make_request(100)
    dispatcher = make_dispatcher(workers, fleet)
    run = workers.run

    async def with_an_early_ticket(
        worker_id: str, start: Start, put: PutDelta, **options: Any
    ) -> None:
        put(TokenDelta(1, (), early_ticket=ticket_of("d0", start.request)))
        await run(worker_id, start, put, **options)

    workers.run = with_an_early_ticket  # type: ignore[method-assign]
    assert_complete(await collect(dispatcher, request), request)
    assert workers.prefetched == []


async def test_an_answer_of_one_token_ends_at_prefill() -> None:
    fleet = keep_busy(make_fleet("p0", "d0"), "d0")
    workers = await play(make_request(2000, max_tokens=1), fleet)
    assert [call.worker_id for call in workers.calls] == ["p0"]


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
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")
    request, full = make_request(2000), Script(after=0, then=Overloaded("No room."))
    workers = await play(request, fleet, Script(), full)
    prefill, failed, good = workers.calls
    assert prefill.hand_over
    assert failed.ticket == good.ticket == ticket_of("p0", request)
    assert failed.worker_id != good.worker_id


async def test_a_used_ticket_is_not_used_again() -> None:
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")
    workers = await play(make_request(2000), fleet, Script(), Script(after=3))
    again, last = workers.calls[2:]
    assert (again.hand_over, again.ticket) == (True, None)
    assert last.ticket == ticket_of("p0", again.request)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_ticket_of_a_source_that_is_gone_is_dropped(is_restarted: bool) -> None:
    fleet = keep_busy(make_fleet("p0", "d0", "d1"), "d0", "d1")

    def end_source(worker_id: str) -> None:
        if is_restarted:
            fleet.worker_synced(make_record("p0", epoch=2), [], make_status())
        else:
            fleet.worker_lost("p0")

    scripts = Script(), Script(after=0)
    workers = await play(make_request(2000), fleet, *scripts, on_failure=end_source)
    assert workers.calls[2].ticket is None
    assert len(workers.calls) == 3 or is_restarted


async def test_a_source_that_decodes_itself_gets_its_ticket_back() -> None:
    """It finds the blocks in its cache; nobody else would ever release them."""
    fleet, request = keep_busy(make_fleet("p0", "d0"), "d0"), make_request(2000)
    workers = await play(request, fleet, Script(), Script(after=0), on_failure=fleet.worker_lost)
    last = workers.calls[2]
    assert (last.worker_id, last.ticket, last.hand_over) == ("p0", None, False)
    assert workers.released == [ticket_of("p0", request)]


async def test_prefill_that_dies_is_done_elsewhere() -> None:
    fleet = keep_busy(make_fleet("p0", "p1", "d0"), "d0")
    workers = await play(make_request(2000), fleet, Script(after=0))
    first, second, third = workers.calls
    assert {first.worker_id, second.worker_id} == {"p0", "p1"}
    assert third.worker_id == "d0"


async def test_a_final_error_is_not_tried_again() -> None:
    final = ContextLengthExceeded("Too long.")
    workers = ScriptedWorkers(deque([Script(after=4, then=final)]))
    fleet = make_fleet("d0", "d1")
    got: list[int] = []
    with pytest.raises(ContextLengthExceeded, match=r"Too long\."):
        async for delta in answers(make_dispatcher(workers, fleet), make_request()):
            got += delta.token_ids
    assert got == [token_at(100 + i) for i in range(4)]
    assert len(workers.calls) == 1
    assert_nothing_reserved(fleet)


async def test_a_request_in_a_step_that_broke_an_engine_is_sent_to_no_other() -> None:
    fleet = make_fleet("d0", "d1", "d2")
    workers = ScriptedWorkers(deque([Script(after=4, then=EngineFailed("A bug."))]))
    with pytest.raises(EngineFailed, match=r"A bug\."):
        await collect(make_dispatcher(workers, fleet), make_request())
    assert len(workers.calls) == 1


async def test_moves_are_bounded() -> None:
    workers = ScriptedWorkers(deque([Script(after=1)] * 50))
    fleet = make_fleet(*(f"d{i}" for i in range(10)))
    dispatcher = make_dispatcher(workers, fleet, max_moves=3)
    with pytest.raises(WorkerLost):
        await collect(dispatcher, make_request())
    assert len(workers.calls) == 4
    assert len({call.worker_id for call in workers.calls}) == 4
    assert len(dispatcher.decision("request-0")) == 4


async def test_the_length_of_answers_is_learned() -> None:
    workers, fleet = ScriptedWorkers(), make_fleet("d0")
    dispatcher = make_dispatcher(workers, fleet)
    await collect(dispatcher, make_request(max_tokens=20))
    once = fleet.answers.usual("toy")
    assert 20 < once < 128
    await collect(dispatcher, make_request(max_tokens=20))
    assert 20 < fleet.answers.usual("toy") < once


@pytest.mark.parametrize(("stops", "num_tokens"), [((), 20), (("b",), 4)])
async def test_the_length_of_an_answer_is_learned_once(
    stops: tuple[str, ...], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that ends with a stop string, which workers do not know."""
    monkeypatch.setattr(scripted_workers, "token_at", lambda position: position)
    [b] = TOKENIZER.encode("b", add_special_tokens=False)
    fleet, request = make_fleet("d0"), make_request(b - 3, max_tokens=20)  # b-3, b-2, ... follow
    spec = request_spec(request.sampling, stops=stops)
    generate = make_dispatcher(ScriptedWorkers(), fleet).generate
    job = RunningJob("r", 0, spec, (request,), generate)
    async for _ in job.batches():
        pass
    assert job.num_completion_tokens == num_tokens
    learned = OutputLengths()
    learned.observe("toy", num_tokens)
    assert fleet.answers.usual("toy") == learned.usual("toy")


async def test_closing_the_answer_closes_the_stream() -> None:
    workers, fleet = ScriptedWorkers(), make_fleet("d0")
    async with aclosing(answers(make_dispatcher(workers, fleet), make_request())) as deltas:
        await anext(deltas)
    assert workers.calls[0].is_closed_early
    assert fleet.answers.usual("toy") == USUAL_OUTPUT_TOKENS, "its length is not known"
    assert_nothing_reserved(fleet)


async def test_a_client_that_leaves_between_two_workers_gives_the_ticket_back() -> None:
    workers, fleet = ScriptedWorkers(), keep_busy(make_fleet("p0", "d0"), "d0")
    request = make_request(2000)
    async with aclosing(answers(make_dispatcher(workers, fleet), request)) as deltas:
        await anext(deltas)  # from the prefill worker
        await anext(deltas)  # from the decode worker, which has used the ticket
    assert [call.hand_over for call in workers.calls] == [True, False]
    assert workers.released == []
    workers.scripts.extend([Script(), Script(after=0, then="stuck")])
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), request))
    await workers.stuck.wait()
    task.cancel()
    await asyncio.wait([task])
    assert workers.released == [ticket_of("p0", request)]


async def test_cancelling_the_reader_is_not_taken_for_a_deadline() -> None:
    workers, fleet = ScriptedWorkers(deque([Script(after=2, then="stuck")])), make_fleet("d0")
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), make_request()))
    await workers.stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_reserved(fleet)


async def test_a_request_counts_on_its_workers_until_they_speak() -> None:
    workers = ScriptedWorkers(deque([Script(after=0, then="stuck")]))
    fleet = keep_busy(make_fleet("p0", "d0"), "d0")
    task = asyncio.create_task(collect(make_dispatcher(workers, fleet), make_request(2000)))
    await workers.stuck.wait()
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
    await workers.stuck.wait()
    assert fleet.view().workers["d0"].num_uncomputed_tokens == 100
    for _ in range(NUM_STATUSES_UNTIL_SEEN):
        fleet.worker_stepped("d0", (), make_status(num_uncomputed_tokens=100))
    assert fleet.view().workers["d0"].num_uncomputed_tokens == 100
    task.cancel()
    await asyncio.wait([task])


scripts = st.builds(
    Script,
    after=st.integers(0, 12),
    then=st.sampled_from(
        ["lost", "vanish", Overloaded("Full."), Unavailable("Draining."), WorkerLost("Gone.")]
    ),
    tokens_per_delta=st.integers(1, 5),
    with_last_tokens=st.booleans(),
)


@examples(50)
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
            async for delta in answers(dispatcher, request):
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


# Requests that have grown on their way


def test_grown_names_the_blocks_that_fill() -> None:
    request = make_request(30, priority=-3)
    tokens = list(range(500, 540))
    bigger = append_tokens(request, tokens, BLOCK_SIZE)
    assert bigger.token_ids == (*request.token_ids, *tokens)
    assert bigger.block_hashes == tuple(hash_blocks(ROOT, bigger.token_ids, BLOCK_SIZE))
    assert (
        append_tokens(append_tokens(request, tokens[:7], BLOCK_SIZE), tokens[7:], BLOCK_SIZE)
        == bigger
    )
    assert (bigger.num_prompt_tokens, bigger.sampling) == (30, request.sampling)
    assert bigger.priority == -3


@pytest.mark.parametrize(
    ("gained", "left"),
    [([1], (2, 3)), ([1, 2, 3], ()), ([1, 2, 3, 4], ()), ([2], ()), ([1, 9], ()), ([1, 2, 9], ())],
)
def test_grown_keeps_the_draft_that_its_tokens_agree_with(
    gained: list[int], left: tuple[int, ...]
) -> None:
    request = make_request(5, draft_token_ids=(1, 2, 3))
    assert append_tokens(request, gained, BLOCK_SIZE).draft_token_ids == left
