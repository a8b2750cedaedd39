"""Streams of one link: in order, cancelled when closed, ended at once when the worker goes."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.blocks import HASH_NBYTES
from disagg.errors import DeadlineExceeded, WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.links import reports, server
from disagg.links.client import FIRST_PAUSE_S, LONGEST_PAUSE_S, Link
from disagg.messages import (
    NO_STREAM,
    Cancel,
    KVEvent,
    Peers,
    Prefetch,
    Resync,
    Start,
    TokenDelta,
    WorkerStatus,
)
from disagg.router.fleet import Fleet
from disagg.router.worker_view import RequestLoad
from tests.deltas import open_stream
from tests.grids import examples
from tests.links.fakes import (
    FakeWorker,
    RecordingObserver,
    collect,
    fake_worker,
    linked,
    make_record,
    make_request,
    pair,
    start_of,
    until,
)
from tests.router.fakes import held_by


async def test_many_streams_share_a_link() -> None:
    async with pair() as (worker, link, _):
        names = [f"request-{i}" for i in range(20)]
        tasks = [asyncio.create_task(collect(open_stream(link, make_request(n)))) for n in names]
        await until(lambda: len(worker.of_type(Start)) == len(names))
        starts = [start_of(worker, name) for name in names]
        for step in range(30):
            finish = "length" if step == 29 else None
            deltas = [
                TokenDelta(start.stream_id, (100 * i + step,), finish)  # type: ignore[arg-type]
                for i, (_, start) in enumerate(starts)
            ]
            worker.step({starts[0][0]: deltas})
            if step % 3 == 0:
                await asyncio.sleep(0)
        for i, task in enumerate(tasks):
            assert await task == [100 * i + step for step in range(30)]
        link.send(Peers((worker.record.peer,)))
        await until(lambda: worker.of_type(Peers))
        assert worker.of_type(Cancel) == []  # nothing came before the peers either


async def test_closing_a_stream_cancels_it_and_no_other() -> None:
    async with pair() as (worker, link, _):
        kept = asyncio.create_task(collect(open_stream(link, make_request("kept"))))
        stream = open_stream(link, make_request("closed"), timeout_s=60)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: len(worker.of_type(Start)) == 2)
        link_id, closed = start_of(worker, "closed")
        worker.step({link_id: [TokenDelta(closed.stream_id, (1,))]})
        await first
        await stream.aclose()
        await until(lambda: worker.of_type(Cancel))
        assert worker.of_type(Cancel) == [Cancel(closed.stream_id)]
        _, start = start_of(worker, "kept")
        late = TokenDelta(closed.stream_id, (2,))
        worker.step({link_id: [late, TokenDelta(start.stream_id, (3,), "stop")]})
        assert await kept == [3]


async def test_time_that_runs_out_ends_the_stream_and_cancels_it() -> None:
    async with pair() as (worker, link, _):
        with pytest.raises(DeadlineExceeded):
            await collect(open_stream(link, make_request("late"), timeout_s=0.05))
        await until(lambda: worker.of_type(Start))
        link_id, start = start_of(worker, "late")
        await until(lambda: (link_id, Cancel(start.stream_id)) in worker.received)


async def test_an_answer_that_ends_as_its_time_runs_out_has_one_end() -> None:
    async with pair() as (worker, link, _):
        got: list[TokenDelta] = []
        start = Start(NO_STREAM, make_request())
        running = asyncio.create_task(link.run(start, got.append, timeout_s=0.2))
        await until(lambda: worker.of_type(Start))
        link_id, start = start_of(worker, "request-0")
        worker.step({link_id: [TokenDelta(start.stream_id, (1,), "stop")]})
        time.sleep(0.3)  # noqa: ASYNC251 - the loop finds the end and the deadline in one turn
        await running
        assert [delta.finish_reason for delta in got] == ["stop"]


@pytest.mark.parametrize("following", [[], [(2,)]])
async def test_a_failure_of_whoever_gets_deltas_ends_its_stream_alone(
    following: list[tuple[int, ...]],
) -> None:
    """An end that arrives with the lost delta must not end the answer as if it were complete."""

    def put(delta: TokenDelta) -> None:
        raise ValueError("planted")

    async with pair() as (worker, link, _):
        running = asyncio.create_task(link.run(Start(NO_STREAM, make_request()), put, timeout_s=60))
        await until(lambda: worker.of_type(Start))
        link_id, start = start_of(worker, "request-0")
        ends = [TokenDelta(start.stream_id, token_ids, "stop") for token_ids in following]
        worker.step({link_id: [TokenDelta(start.stream_id, (1,)), *ends]})
        with pytest.raises(ValueError, match="planted"):
            await running
        assert link.is_up


async def test_a_cancelled_reader_cancels_the_request() -> None:
    async with pair() as (worker, link, _):
        task = asyncio.create_task(collect(open_stream(link, make_request())))
        await until(lambda: worker.of_type(Start))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: worker.of_type(Cancel))


async def test_prefetches_reach_a_worker_whose_link_is_up() -> None:
    asked = Prefetch(KVTicket("1+1", "p", 1, "toy", 16, (0,), (0,)), (bytes(HASH_NBYTES),), "trace")
    async with pair() as (worker, link, _):
        link.send(asked)
        await until(lambda: worker.of_type(Prefetch))
        assert worker.of_type(Prefetch) == [asked]
        link.close()
        link.send(asked)  # nobody is there, and nothing is raised


async def test_a_dead_worker_ends_its_streams_after_what_it_had_said() -> None:
    observer = RecordingObserver()
    async with fake_worker() as worker, linked(worker.record, observer) as link:
        await until(lambda: observer.held)
        got: list[int] = []

        async def read() -> None:
            async for delta in open_stream(link, make_request(), timeout_s=60):
                got.extend(delta.token_ids)

        task = asyncio.create_task(read())
        await until(lambda: worker.of_type(Start))
        link_id, start = start_of(worker, "request-0")
        worker.step({link_id: [TokenDelta(start.stream_id, (1, 2))]})
        await worker.server.close()
        with pytest.raises(WorkerLost, match="decode-0 was lost"):
            await asyncio.wait_for(task, 60)
        assert got == [1, 2]
        assert observer.calls[-1] == ("lost", "decode-0")
        assert observer.held == {}
        with pytest.raises(WorkerLost, match="not linked"):
            await collect(open_stream(link, make_request()))


async def test_a_lost_link_comes_back_with_a_fresh_snapshot() -> None:
    observer = RecordingObserver()
    async with fake_worker() as worker, linked(worker.record, observer) as link:
        await until(lambda: observer.held)
        await worker.server.close()
        await until(lambda: not observer.held)
        async with fake_worker(worker.record) as again:
            again.held = [b"x" * 16]
            await until(lambda: observer.held)
            assert observer.held == {"decode-0": {b"x" * 16}}
            assert link.is_up
            calls = [call for call, _ in observer.calls]
            assert calls == ["synced", "lost", "synced"]


async def test_a_link_never_waits_long_before_it_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time does not pass here: a pause is written down and over."""
    sleep = asyncio.sleep
    pauses: list[float] = []

    async def no_time(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async with fake_worker() as gone:
        record = gone.record
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", no_time)
        async with linked(record, RecordingObserver()):
            while len(pauses) < 12:
                await sleep(0)
    assert FIRST_PAUSE_S / 2 <= pauses[0] <= FIRST_PAUSE_S
    assert LONGEST_PAUSE_S / 2 <= max(pauses) <= LONGEST_PAUSE_S


async def test_nothing_is_sent_before_the_handshake_is_over() -> None:
    observer = RecordingObserver()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        record = make_record(port=silent.getsockname()[1])
        async with linked(record, observer, handshake_timeout_s=0.1) as link:
            await until(lambda: link._connection is not None and link._connection.is_open)
            with pytest.raises(WorkerLost, match="not linked"):
                await collect(open_stream(link, make_request()))
            await until(lambda: link.last_error == "no answer in time")


async def test_a_prompt_may_be_longer_than_a_handshake() -> None:
    async with pair() as (worker, link, _):
        worker.on_start = lambda link_id, start: worker.step(
            {link_id: [TokenDelta(start.stream_id, start.request.token_ids, "stop")]}
        )
        tokens = await collect(open_stream(link, make_request(num_tokens=500_000)))
        assert tokens == list(range(500_000))


async def test_parts_of_a_snapshot_are_no_reports_of_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a request that was just sent would not count any more before the worker has it."""
    for module in (server, reports):
        monkeypatch.setattr(module, "PART_NUM_BLOCKS", 1)
    fleet, names = Fleet(), [bytes([number]) * 16 for number in range(6)]
    async with fake_worker() as worker, linked(worker.record, fleet):
        await until(lambda: fleet.view().workers)
        fleet.sent(fleet.reserve("decode-0", RequestLoad(0, 1, 100)))
        worker.server.publish_snapshot(1, names, WorkerStatus())
        await until(lambda: held_by(fleet.index, names) == {"decode-0": 6})
        assert fleet.view().workers["decode-0"].num_decoding == 1


cache_names = st.sampled_from([bytes([i]) * 16 for i in range(6)])
cache_steps = st.one_of(
    st.tuples(st.sampled_from(["stored", "removed"]), cache_names),
    st.tuples(st.sampled_from(["publish", "ask", "answer"]), st.just(b"")),
)


@examples(20)
@given(st.lists(cache_steps, max_size=40), st.sampled_from([1, 2, 4096]))
def test_the_observers_copy_is_the_workers_cache(
    steps: list[tuple[str, bytes]], part_names: int
) -> None:
    """Whatever changes around a snapshot and its parts, even what was not published yet."""

    async def ask(worker: FakeWorker, link: Link) -> None:
        num_asked = len(worker.of_type(Resync))
        assert link._connection is not None
        link._connection.send(Resync())
        await until(lambda: len(worker.of_type(Resync)) > num_asked)

    async def run() -> None:
        async with pair() as (worker, link, observer):
            worker.answers_resync = False
            held: set[bytes] = set()
            changes: list[KVEvent] = []
            for kind, name in steps:
                if kind == "stored":
                    held.add(name)
                    changes.append(KVEvent("stored", (name,)))
                elif kind == "removed":
                    held.discard(name)
                    changes.append(KVEvent("removed", (name,)))
                elif kind == "publish":
                    worker.step(events=changes)
                    changes = []
                elif kind == "ask":
                    await ask(worker, link)
                else:
                    worker.server.publish_snapshot(1, list(held), WorkerStatus())
            worker.server.publish_snapshot(1, list(held), WorkerStatus())
            worker.step(events=changes, status=WorkerStatus(num_holds=9))
            await until(lambda: not worker.server._links[1].reports.is_holding)
            worker.step(status=WorkerStatus(num_holds=10))  # after the last part
            await until(lambda: observer.statuses["decode-0"].num_holds == 10)
            assert observer.held["decode-0"] == held

    with pytest.MonkeyPatch.context() as patch:
        for module in (server, reports):
            patch.setattr(module, "PART_NUM_BLOCKS", part_names)
        asyncio.run(run())


async def test_closing_a_link_tells_the_observer_at_once() -> None:
    async with pair() as (worker, link, observer):
        task = asyncio.create_task(collect(open_stream(link, make_request())))
        await until(lambda: worker.of_type(Start))
        link.close()
        assert observer.calls[-1] == ("lost", "decode-0")
        with pytest.raises(WorkerLost, match="ingress closed the link"):
            await task
