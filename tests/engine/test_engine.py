"""The engine around the scheduler: deadlines, errors, evicted blocks."""

from __future__ import annotations

import pytest

from disagg.blocks import BlockHash
from disagg.errors import DeadlineExceeded, EngineFailed, RequestError, WorkerLost
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_engine, new_sequence

NO_STOP: frozenset[int] = frozenset()


def test_step_is_empty_when_there_is_nothing_to_do() -> None:
    engine, _ = new_engine(8, 4)
    assert not engine.has_work
    assert engine.step() == []
    assert not engine.last_plan.sequences


def test_a_passed_deadline_ends_a_sequence_in_any_queue() -> None:
    engine, _ = new_engine(8, 4, max_num_seqs=1)
    late = [new_sequence((5, 6), 4, stop_ids=NO_STOP, deadline_unix_s=d) for d in (10.0, 20.0)]
    kept = new_sequence((7, 8), 4, 6, stop_ids=NO_STOP, deadline_unix_s=30.0)
    for sequence in (*late, kept):
        engine.submit(sequence)
    engine.expire(9.99)
    assert [event.sequence for event in engine.step()] == [late[0]]
    engine.expire(20.0)
    events = engine.step()
    ended = [event for event in events if event.is_last]
    assert [event.sequence for event in ended] == late
    for event in ended:
        assert isinstance(event.error, DeadlineExceeded) and event.error.http_status == 504
    assert "after 1 of at most 4 tokens" in str(ended[0].error)
    assert [event.sequence for event in events[2:]] == [kept]
    engine.check()
    while engine.has_work:
        engine.step()
    assert kept.tokens[2:] == expected_tokens((7, 8), 6)


def test_evicted_blocks_are_offered_while_their_bytes_are_intact() -> None:
    engine, kv = new_engine(4, 4)
    saved: list[tuple[int, BlockHash, bytes]] = []
    engine.save_evicted = lambda evicted: saved.extend(
        (block_id, name, kv.read_block(block_id)) for block_id, name in evicted
    )
    first = new_sequence(tuple(range(5, 14)), 4, 2, stop_ids=NO_STOP)
    engine.submit(first)
    engine.step()
    before = {name: kv.read_block(engine.pool.match([name])[0]) for name in engine.pool.hashes()}
    assert len(before) == 2
    engine.step()
    engine.submit(new_sequence(tuple(range(30, 43)), 4, 2, stop_ids=NO_STOP))
    engine.step()
    assert {name: raw for _, name, raw in saved} == before


def test_reserved_blocks_may_be_written_at_once() -> None:
    engine, _ = new_engine(2, 4)
    saved: list[BlockHash] = []
    engine.save_evicted = lambda evicted: saved.extend(name for _, name in evicted)
    engine.submit(new_sequence((5, 6, 7, 8, 9), 4, 1))
    engine.step()
    names = engine.pool.hashes()
    block_ids = engine.reserve(2)
    assert tuple(saved) == names and block_ids is not None


def test_an_error_is_the_last_event_of_its_sequence_only() -> None:
    engine, _ = new_engine(8, 4)
    wrong, right = new_sequence((5, 6), 4), new_sequence((7, 8), 4, 1)
    engine.submit(wrong)
    engine.submit(right)
    error = WorkerLost("gone")
    engine.end(wrong, error)
    assert engine.has_work
    events = engine.step()
    assert [(event.sequence, event.error) for event in events] == [(wrong, error), (right, None)]
    assert not engine.has_work
    engine.check()


def test_a_second_request_of_the_same_name_ends_alone() -> None:
    engine, _ = new_engine(8, 4)
    first, second = new_sequence((5, 6), 4, 1), new_sequence((7, 8), 4, 1)
    second.request_id = first.request_id
    engine.submit(first)
    with pytest.raises(RequestError, match="already running") as caught:
        engine.submit(second)
    engine.end(second, caught.value)
    events = engine.step()
    assert [(e.sequence, e.finish_reason) for e in events] == [(second, None), (first, "length")]
    engine.check()


def test_ending_all_gives_every_block_back() -> None:
    engine, _ = new_engine(8, 4, max_num_seqs=1)
    sequences = [new_sequence((5, 6, i), 4, stop_ids=NO_STOP) for i in range(3)]
    for sequence in sequences:
        engine.submit(sequence)
    engine.step()
    engine.end_all(WorkerLost("stopping"))
    assert [event.sequence for event in engine.step()] == sequences
    assert engine.pool.num_free == 8
    engine.check()


def test_a_broken_engine_reports_everybody_once() -> None:
    engine, _ = new_engine(8, 4)
    first, second = new_sequence((5, 6), 4), new_sequence((7, 8), 4)
    engine.submit(first)
    engine.submit(second)
    third, broken, lost = new_sequence((9, 1), 4), EngineFailed("broken"), WorkerLost("lost")
    engine.step()
    engine.end(first, WorkerLost("gone"))
    engine.submit(third)
    events = engine.abandon(broken, lost)
    assert [event.sequence for event in events] == [first, second, third]
    assert [event.error for event in events[1:]] == [broken, lost]  # the third was in no step
    assert engine.abandon(broken, lost) == [] and not engine.has_work
