"""The thread that owns an engine: everything posted is answered, whatever happens."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from disagg.engine.engine import Engine
from disagg.engine.engine_thread import EngineThread, StepResult, engine_failed
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import SampledToken, StepPlan, TokenEvent
from disagg.errors import DeadlineExceeded, DisaggError, EngineFailed, RequestError, WorkerLost
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_engine, new_sequence

NO_STOP: frozenset[int] = frozenset()
LONG_S = 30.0


class Inbox:
    """Results as they come, and a way to wait for a sequence's last event."""

    def __init__(self) -> None:
        self.results: queue.Queue[StepResult] = queue.Queue()
        self.seen: list[StepResult] = []

    def events_of(self, sequence: Sequence) -> list[TokenEvent]:
        """All events of a sequence, up to its last one."""
        while True:
            events = [e for r in self.seen for e in r.events if e.sequence is sequence]
            if events and events[-1].is_last:
                return events
            self.seen.append(self.results.get(timeout=LONG_S))

    def wait_for(self, holds: Callable[[StepResult], bool]) -> StepResult:
        while not (self.seen and holds(self.seen[-1])):
            self.seen.append(self.results.get(timeout=LONG_S))
        return self.seen[-1]


@contextmanager
def started(
    engine: Engine,
    between_steps: Callable[[float], bool] | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[tuple[EngineThread, Inbox]]:
    inbox = Inbox()
    thread = EngineThread(
        engine,
        publish=inbox.results.put,
        clock=clock,
        timer=count().__next__,
        between_steps=between_steps,
    )
    thread.start()
    try:
        yield thread, inbox
    finally:
        assert thread.stop(LONG_S)


def submit(thread: EngineThread, sequence: Sequence) -> None:
    """As a worker does: a refusal is the sequence's only event."""

    def enter() -> None:
        try:
            thread.engine.submit(sequence)
        except DisaggError as error:
            thread.engine.end(sequence, error)

    thread.post(enter)


def test_submitted_sequences_come_back_as_events() -> None:
    engine, _ = new_engine(40, 4)
    with started(engine) as (thread, inbox):
        sequences = [new_sequence((5, 6, i), 4, 6, stop_ids=NO_STOP) for i in range(6)]
        for sequence in sequences:
            submit(thread, sequence)
        for i, sequence in enumerate(sequences):
            tokens = [t for event in inbox.events_of(sequence) for t in event.token_ids]
            assert tokens == expected_tokens((5, 6, i), 6)
        timed = [result for result in inbox.seen if result.features is not None]
        assert timed and all(result.seconds == 1.0 for result in timed)
        assert inbox.wait_for(lambda r: r.status.num_running == 0).status.num_free_blocks == 40
        stored = {n for r in inbox.seen for e in r.kv_events for n in e.block_hashes}
        assert stored == set(engine.pool.hashes())
        assert thread.failed is None


def test_the_engine_is_told_of_its_thread_before_anything_runs_there() -> None:
    engine, _ = new_engine(40, 4)
    told: list[str] = []
    engine.begin_thread = lambda: told.append(threading.current_thread().name)
    with started(engine) as (thread, inbox):
        thread.post(lambda: told.append("a message"))
        sequence = new_sequence((5, 6), 4, 2, stop_ids=NO_STOP)
        submit(thread, sequence)
        assert inbox.events_of(sequence)
    assert told == ["engine", "a message"]


def test_a_refusal_is_the_only_event() -> None:
    engine, _ = new_engine(2, 4)
    with started(engine) as (thread, inbox):
        sequence = new_sequence((5,) * 30, 4)
        submit(thread, sequence)
        (event,) = inbox.events_of(sequence)
        assert isinstance(event.error, RequestError)
        assert thread.failed is None


def test_abort_frees_the_blocks() -> None:
    engine, _ = new_engine(300, 4)
    with started(engine) as (thread, inbox):
        sequence = new_sequence((5, 6), 4, 900, stop_ids=NO_STOP)
        submit(thread, sequence)
        inbox.wait_for(lambda r: r.status.num_running == 1)

        def abort() -> None:
            engine.abort(sequence.request_id)

        thread.post(abort)
        inbox.wait_for(lambda r: r.status.num_running == 0 and r.status.num_free_blocks == 300)


def test_deadlines_are_kept_by_the_given_clock() -> None:
    engine, _ = new_engine(300, 4)
    seconds = itertools.count()  # one passes between two looks
    with started(engine, clock=lambda: float(next(seconds))) as (thread, inbox):
        next_s = next(seconds)
        sequence = new_sequence((5, 6), 4, 900, stop_ids=NO_STOP, deadline_unix_s=next_s + 500.0)
        submit(thread, sequence)
        *events, last = inbox.events_of(sequence)
        assert isinstance(last.error, DeadlineExceeded)
        assert any(event.token_ids for event in events)


def test_between_steps_runs_in_the_engines_thread_with_the_clock() -> None:
    engine, _ = new_engine(8, 4)
    calls: queue.Queue[tuple[float, int]] = queue.Queue()

    def between_steps(now: float) -> bool:
        calls.put((now, threading.get_ident()))
        return True

    with started(engine, between_steps, clock=lambda: 42.0) as (thread, _):
        asked: queue.Queue[int] = queue.Queue()
        thread.post(lambda: asked.put(threading.get_ident()))
        ident = asked.get(timeout=LONG_S)
        assert [calls.get(timeout=LONG_S) for _ in range(3)] == [(42.0, ident)] * 3
        assert ident != threading.get_ident()


def test_an_idle_thread_says_nothing_and_keeps_turning() -> None:
    engine, _ = new_engine(8, 4)
    turns: queue.Queue[float] = queue.Queue()

    def between_steps(now: float) -> bool:
        turns.put(now)
        return True

    with started(engine, between_steps) as (thread, inbox):
        inbox.wait_for(lambda r: r.status.num_blocks == 8)
        for _ in range(20):
            turns.get(timeout=LONG_S)
        assert inbox.results.empty()
        assert thread.num_turns >= 20


class BrokenRunner:
    def run(self, plan: StepPlan) -> list[SampledToken | None]:
        raise RuntimeError("device on fire")


def test_a_failure_ends_every_request_also_those_that_come_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = new_engine(8, 4)
    engine.runner = BrokenRunner()
    with started(engine) as (thread, inbox):
        first, second = new_sequence((5, 6), 4), new_sequence((7, 8), 4)
        submit(thread, first)
        (event,) = inbox.events_of(first)
        assert isinstance(event.error, EngineFailed)
        assert "device on fire" in event.error.message
        assert isinstance(thread.failed, RuntimeError)
        submit(thread, second)  # which another worker may serve
        (event,) = inbox.events_of(second)
        assert isinstance(event.error, WorkerLost)
        assert all(result.failure is not None for result in inbox.seen[-2:])
    (record,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert "device on fire" in record.getMessage() and record.exc_info


def test_a_failure_between_steps_is_told_even_if_nothing_runs() -> None:
    engine, _ = new_engine(8, 4)

    def between_steps(now: float) -> bool:
        raise OSError("transport gone")

    with started(engine, between_steps) as (thread, inbox):
        result = inbox.wait_for(lambda r: r.failure is not None)
        assert result.failure is not None and "transport gone" in result.failure.message
        thread.post(lambda: 1 / 0)  # type: ignore[arg-type]
        sequence = new_sequence((5, 6), 4)
        submit(thread, sequence)
        assert isinstance(inbox.events_of(sequence)[0].error, WorkerLost)


def test_a_device_that_reports_its_own_fault_is_no_requests_fault() -> None:
    cause = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    assert isinstance(engine_failed(cause), EngineFailed)
    cause.error_code = 214  # type: ignore[attr-defined]
    assert isinstance(engine_failed(cause), WorkerLost)


def test_stopping_ends_what_still_runs() -> None:
    engine, _ = new_engine(300, 4)
    with started(engine) as (thread, inbox):
        sequence = new_sequence((5, 6), 4, 900, stop_ids=NO_STOP)
        submit(thread, sequence)
        inbox.wait_for(lambda r: bool(r.events))
        assert thread.stop(LONG_S)
        assert isinstance(inbox.events_of(sequence)[-1].error, WorkerLost)
        assert engine.pool.num_free == 300
