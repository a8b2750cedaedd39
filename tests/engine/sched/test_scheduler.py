"""Any workload gives the tokens of an engine without limits, and every block is accounted for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from disagg.engine.engine import Engine
from disagg.engine.sched.step import Sampled, SampledToken, StepPlan
from disagg.errors import ContextLengthExceeded, RequestError, StartupError
from disagg.messages import TokenLogprobs
from tests import generate_requests
from tests.engine.fake_runner import FakeRunner, expected_tokens, work_of
from tests.engine.workload import (
    Driver,
    Workload,
    arrive,
    new_engine,
    new_sequence,
    prompt,
    workloads,
)
from tests.grids import examples

NO_STOP: frozenset[int] = frozenset()


def run(engine: Engine, num_steps: int = 1000) -> dict[str, list[int]]:
    """Tokens of each request, until all have ended or the steps are used up."""
    outputs: dict[str, list[int]] = {}
    for _ in range(num_steps):
        if not engine.has_work:
            break
        for event in engine.step():
            outputs.setdefault(event.sequence.request_id, []).extend(event.token_ids)
        engine.check()
    return outputs


def step_sizes(engine: Engine) -> list[tuple[str, int]]:
    engine.step()
    return [(work.sequence.request_id, work.num_tokens) for work in work_of(engine.last_plan)]


@examples(66)
@given(workloads())
def test_random_workloads(workload: Workload) -> None:
    Driver(workload).play()


def test_decodes_go_first_and_prompts_get_the_rest_of_the_budget() -> None:
    engine, _ = new_engine(40, 4, max_num_batched_tokens=10)
    first, second = (
        new_sequence(prompt(12), 4, 9, stop_ids=NO_STOP),
        new_sequence(prompt(20, 30), 4, stop_ids=NO_STOP),
    )
    a, b = first.request_id, second.request_id
    engine.submit(first)
    assert step_sizes(engine) == [(a, 10)]
    engine.submit(second)
    assert step_sizes(engine) == [(a, 2), (b, 8)]
    assert step_sizes(engine) == [(a, 1), (b, 9)]
    assert engine.last_plan.num_decodes == 1
    assert step_sizes(engine) == [(a, 1), (b, 3)]
    assert step_sizes(engine) == [(a, 1), (b, 1)]
    assert engine.last_plan.num_decodes == 2


def test_features_are_those_of_the_time_model() -> None:
    engine, _ = new_engine(40, 4, max_num_batched_tokens=10)
    engine.submit(new_sequence(prompt(8), 4, 9, stop_ids=NO_STOP))
    engine.step()
    engine.submit(new_sequence(prompt(20, 30), 4))
    engine.step()
    engine.step()
    features = engine.last_plan.features
    assert features.num_decoding == 1
    assert features.num_decode_context == 10
    assert features.num_new_tokens == 9
    assert features.num_attended == sum(range(10, 19))
    assert engine.last_plan.num_new_tokens == 10


def test_a_full_prefix_hit_still_computes_the_last_token() -> None:
    engine, _ = new_engine(40, 4)
    engine.submit(new_sequence(prompt(8), 4))
    run(engine)
    again = new_sequence(prompt(8), 4)
    engine.submit(again)
    assert step_sizes(engine) == [(again.request_id, 4)]
    assert again.num_cached_tokens == 4


def test_blocks_filled_by_generated_tokens_are_found_by_the_next_turn() -> None:
    engine, _ = new_engine(40, 4)
    first = new_sequence(prompt(6), 4, 9, stop_ids=NO_STOP)
    engine.submit(first)
    answer = run(engine)[first.request_id]
    turn = (*prompt(6), *answer, 5, 6, 7)
    second = new_sequence(turn, 4, 5, stop_ids=NO_STOP)
    engine.submit(second)
    output = run(engine)[second.request_id]
    assert second.num_cached_tokens == 12, "three full blocks of 14 computed tokens"
    assert output == expected_tokens(turn, 5)


def test_without_prefix_caching_nothing_is_findable() -> None:
    engine, _ = new_engine(40, 4, caching=False)
    for _ in range(2):
        sequence = new_sequence(prompt(12), 4)
        engine.submit(sequence)
        run(engine)
        assert sequence.num_cached_tokens == 0
    assert engine.pool.hashes() == () and engine.pool.take_events() == ()


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    engine, _ = new_engine(8, 4)
    running = new_sequence(prompt(16), 4, 8, stop_ids=NO_STOP)
    large, small = new_sequence(prompt(20, 30), 4), new_sequence(prompt(2, 9), 4)
    for sequence in (running, large, small):
        engine.submit(sequence)
    engine.step()
    engine.step()
    assert engine.is_short
    assert engine.scheduler.waiting == [large, small]
    order = [e.sequence for _ in range(40) for e in engine.step() if e.is_last]
    assert order[0] is running and not engine.is_short


def test_the_most_urgent_is_admitted_first_and_of_these_the_earliest() -> None:
    """Wherever they wait; but nobody who runs is stopped for them."""
    engine, kv = new_engine(40, 4, max_num_seqs=1)
    running = new_sequence(prompt(8), 4, 4, stop_ids=NO_STOP, priority=5)
    engine.submit(running)
    engine.step()
    with_kv = new_sequence(prompt(6, 60), 4, 4, output=(7,), stop_ids=NO_STOP, priority=1)
    arrive(engine, kv, with_kv, 6)
    usual, urgent, usual_too, late, urgent_too = (
        new_sequence(prompt(5, 10 * i), 4, 2, stop_ids=NO_STOP, priority=priority)
        for i, priority in enumerate((0, -1, 0, 2, -1))
    )
    for sequence in (usual, urgent, usual_too, late, urgent_too):
        engine.submit(sequence)
    order = [e.sequence for _ in range(40) for e in engine.step() if e.is_last]
    assert order == [running, urgent, urgent_too, usual, usual_too, with_kv, late]


def test_blocks_go_to_the_more_urgent_before_less_urgent_arrivals_get_any() -> None:
    engine, _ = new_engine(8, 4)
    engine.submit(new_sequence(prompt(12), 4, 20, stop_ids=NO_STOP))
    less, more = (new_sequence(prompt(8), 4, priority=priority) for priority in (1, -1))
    for sequence in (less, more):
        engine.scheduler.number(sequence)
    large = new_sequence(prompt(20, 9), 4)
    engine.submit(large)
    engine.step()
    assert engine.is_short
    assert engine.reserve(1, less.arrival) is None, "it came before, and is less urgent"
    assert engine.reserve(1, more.arrival) is not None


def test_an_arrival_joins_with_its_kv_and_its_blocks_are_findable() -> None:
    engine, kv = new_engine(20, 4)
    first = tuple(expected_tokens(prompt(10), 1))
    sequence = new_sequence(prompt(10), 4, 6, output=first, stop_ids=NO_STOP)
    arrive(engine, kv, sequence, 10)
    assert engine.pool.match(sequence.block_hashes) == sequence.block_ids[:2]
    assert step_sizes(engine) == [(sequence.request_id, 1)]
    assert engine.last_plan.num_decodes == 1
    run(engine)
    assert sequence.tokens[10:] == expected_tokens(prompt(10), 6)


def test_reserving_leaves_running_sequences_a_block_to_grow() -> None:
    engine, _ = new_engine(10, 4)
    engine.submit(new_sequence(prompt(8), 4, 20, stop_ids=NO_STOP))
    engine.submit(new_sequence(prompt(8, 40), 4, 20, stop_ids=NO_STOP))
    engine.step()
    assert engine.pool.num_free == 6
    assert engine.reserve(5) is None
    block_ids = engine.reserve(4)
    assert block_ids is not None and len(block_ids) == 4
    engine.check([block_ids])
    assert engine.reserve(1) is None


def test_arrivals_and_prompts_do_not_starve_each_other() -> None:
    engine, _ = new_engine(8, 4)
    engine.submit(new_sequence(prompt(12), 4, 20, stop_ids=NO_STOP))
    early, prompt_in_wait = new_sequence(prompt(8), 4), new_sequence(prompt(20, 9), 4)
    engine.scheduler.number(early)
    engine.submit(prompt_in_wait)
    late = new_sequence(prompt(8), 4)
    engine.scheduler.number(late)
    engine.step()
    assert engine.is_short, "the waiting prompt needs five blocks, and four are left for growth"
    assert engine.reserve(1, late.arrival) is None
    assert engine.reserve(1) is None
    taken = engine.reserve(1, early.arrival)
    assert taken is not None
    assert engine.reserve(7, early.arrival) is None
    small = new_sequence(prompt(2, 30), 4)
    engine.abort(prompt_in_wait.request_id)
    engine.submit(small)
    engine.step()
    assert engine.scheduler.waiting == [small], "a refused arrival is older"
    engine.step()
    assert engine.scheduler.waiting == [], "it did not ask again"


def test_handing_over_leaves_after_one_token_with_the_blocks() -> None:
    engine, _ = new_engine(20, 4)
    sequence = new_sequence(prompt(9), 4, 5, stop_ids=NO_STOP, hand_over=True)
    engine.submit(sequence)
    (event,) = engine.step()
    assert event.left and event.is_last and event.finish_reason is None
    assert sequence.num_computed == 9 and len(sequence.block_ids) == 3
    assert not engine.has_work
    engine.check([sequence.block_ids])
    engine.pool.release(sequence.block_ids)
    assert engine.pool.num_free == 20


def test_a_request_that_ends_with_its_first_token_is_not_handed_over() -> None:
    engine, _ = new_engine(20, 4)
    engine.submit(new_sequence(prompt(9), 4, 1, hand_over=True))
    (event,) = engine.step()
    assert event.finish_reason == "length" and not event.left
    engine.check()


def test_stop_tokens_and_min_tokens() -> None:
    expected = expected_tokens(prompt(5), 8)
    stop = expected[1]
    assert stop != expected[0]
    engine, _ = new_engine(20, 4)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({}, 2, "stop"),
        ({"max_tokens": 2}, 2, "stop"),
        ({"min_tokens": 3}, 8, "length"),
        ({"stop_token_ids": ()}, 8, "length"),
    ]
    for changes, num_tokens, reason in cases:
        usual: dict[str, Any] = {"max_tokens": 8, "stop_token_ids": (stop,)}
        sequence = generate_requests.new_sequence(prompt(5), **(usual | changes))
        engine.submit(sequence)
        events = [event for _ in range(9) for event in engine.step()]
        assert [token for event in events for token in event.token_ids] == expected[:num_tokens]
        assert events[-1].finish_reason == reason


def test_what_can_never_fit_is_refused_in_numbers() -> None:
    engine, _ = new_engine(4, 4, max_model_len=100)
    for sequence, error, words in [
        (new_sequence(prompt(10), 4, 8), RequestError, "need 5 KV blocks of 4 tokens.* has 4"),
        (new_sequence(prompt(100), 4, 8), ContextLengthExceeded, "100 tokens.* allows 100 at most"),
        (new_sequence(prompt(4), 4, 2, output=(5, 6)), RequestError, "max_tokens is 2, and 2"),
        (new_sequence((), 4), RequestError, "empty"),
        (new_sequence(prompt(8), 2, 2), RequestError, "4 block hashes for 8 tokens"),
        (new_sequence((4, 1 << 31), 4, 2), RequestError, "Token ids must lie between 0 and"),
    ]:
        with pytest.raises(error, match=words):
            engine.submit(sequence)
    exact = new_sequence(prompt(10), 4, 7, stop_ids=NO_STOP)
    engine.submit(exact)
    with pytest.raises(RequestError, match="already"):
        engine.submit(exact)
    assert run(engine)[exact.request_id] == expected_tokens(prompt(10), 7)
    engine.check()


def test_misuse_is_refused() -> None:
    engine, _ = new_engine(4, 4)
    sequence = new_sequence(prompt(6), 4)
    with pytest.raises(ValueError, match="cannot join"):
        engine.join(sequence)
    sequence.block_ids, sequence.num_computed = engine.reserve(2) or [], 4
    with pytest.raises(ValueError, match="call `join`"):
        engine.submit(sequence)
    with pytest.raises(StartupError, match="max_num_batched_tokens is 3"):
        new_engine(4, 4, max_num_seqs=4, max_num_batched_tokens=3)


def test_status_counts_what_is_left_to_do() -> None:
    engine, _ = new_engine(30, 4, max_num_seqs=2, max_num_batched_tokens=8)
    engine.submit(new_sequence(prompt(5), 4, 9, stop_ids=NO_STOP))
    engine.submit(new_sequence(prompt(11, 30), 4))
    engine.submit(new_sequence(prompt(6, 20), 4))
    engine.step()
    status = engine.status()
    assert (status.num_running, status.num_waiting) == (2, 1)
    assert status.num_uncomputed_tokens == 8 + 6
    assert status.num_context_tokens == 5 + 3
    assert (status.num_free_blocks, status.num_blocks) == (25, 30)


def test_what_is_cached_of_a_waiting_prompt_is_no_work() -> None:
    """A router would send the next turn of a conversation elsewhere."""
    engine, _ = new_engine(30, 4)
    engine.submit(new_sequence(prompt(9), 4, 1))
    engine.step()
    engine.submit(new_sequence(prompt(13), 4, 1))
    assert engine.status().num_uncomputed_tokens == 13 - 8
    engine.check()
    engine.step()
    assert engine.status().num_uncomputed_tokens == 0
    engine.check()


class ScoringFakeRunner(FakeRunner):
    """Says log-probabilities of one request's tokens."""

    scored_id = ""

    def run(self, plan: StepPlan) -> list[Sampled]:
        return [
            SampledToken(token, TokenLogprobs(-0.5))
            if isinstance(token, int) and sequence.request_id == self.scored_id
            else token
            for sequence, token in zip(plan.sequences, super().run(plan), strict=True)
        ]


def test_only_who_wants_logprobs_gets_them() -> None:
    engine, kv = new_engine(40, 4, max_num_seqs=3, max_num_batched_tokens=12)
    engine.runner = runner = ScoringFakeRunner(kv)
    sequences = [new_sequence(prompt(4, first), 4, 7, stop_ids=NO_STOP) for first in (4, 20, 40)]
    runner.scored_id = sequences[1].request_id
    for sequence in sequences:
        engine.submit(sequence)
    engine.step()
    num_scored = 0
    while engine.has_work:
        for event in engine.step():
            num_scored += event.logprobs is not None
            assert (event.logprobs is not None) == (event.sequence is sequences[1])
        engine.check()
    assert num_scored == 6
    for sequence, first in zip(sequences, (4, 20, 40), strict=True):
        assert sequence.tokens[4:] == expected_tokens(prompt(4, first), 7)


def test_check_names_the_difference() -> None:
    engine, _ = new_engine(30, 4)
    sequence = new_sequence(prompt(5), 4, 9, stop_ids=NO_STOP)
    engine.submit(sequence)
    engine.step()
    sequence.num_slots += 1
    with pytest.raises(AssertionError, match="slots are miscounted"):
        engine.check()
    sequence.num_slots -= 1
    engine.scheduler.running.clear()
    with pytest.raises(AssertionError, match="the queues and the sequences by request id differ"):
        engine.check()
