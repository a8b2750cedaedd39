"""Prompts share a step with streams: these go on at once, and within their TPOT SLO."""

from __future__ import annotations

import math

import pytest

from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.time_model import StepTimeModel
from tests import generate_requests
from tests.engine.fake_runner import FakeKV
from tests.engine.workload import arrive, new_engine, new_sequence, prompt

NO_STOP: frozenset[int] = frozenset()
TIMES = StepTimeModel(5e-3, 1e-4, 1e-12, 1e-3, 1e-12)  # 5 ms, 0.1 ms a prompt token, 1 ms a stream
MOST = 100  # tokens of a step


def stream(tpot_slo_s: float, max_tokens: int = 40) -> Sequence:
    name = f"stream-{tpot_slo_s}"
    return generate_requests.new_sequence(
        prompt(4), request_id=name, max_tokens=max_tokens, tpot_slo_s=tpot_slo_s
    )


def engine_with_times() -> tuple[Engine, FakeKV]:
    engine, kv = new_engine(400, 4, max_num_batched_tokens=MOST)
    engine.scheduler.step_budget.times = lambda: TIMES
    return engine, kv


def begin(engine: Engine, *streams: Sequence) -> None:
    for each in streams:
        engine.submit(each)
    engine.step()


def num_prompt_tokens(engine: Engine, now_s: float) -> int:
    engine.scheduler.step_budget.now_s = now_s
    engine.step()
    return engine.last_plan.features.num_new_tokens


@pytest.mark.parametrize(
    ("slos_s", "num_tokens"),
    [
        ((math.inf,), MOST - 1),  # nobody has one: as many as there may be
        ((0.012,), 57),  # 0.98 x 12 ms - 5 ms - 1 ms
        ((0.012, 0.010), 27),  # the tightest, and 1 ms for the second stream
        ((0.012, math.inf), 47),  # who has none limits nothing
        ((0.5,), MOST - 1),
        ((0.0061,), 16),  # streams alone take as much: a few, since prompts must end
    ],
)
def test_a_step_takes_as_long_as_its_tightest_stream_allows(
    slos_s: tuple[float, ...], num_tokens: int
) -> None:
    engine, _ = engine_with_times()
    begin(engine, *map(stream, slos_s))
    engine.submit(new_sequence(prompt(400, 9), 4, stop_ids=NO_STOP))
    assert num_prompt_tokens(engine, 0.0) == num_tokens


def test_streams_without_an_slo_cost_a_plan_nothing() -> None:
    engine, _ = new_engine(400, 4, max_num_batched_tokens=MOST)
    begin(engine, *[new_sequence(prompt(4), 4, 40, stop_ids=NO_STOP) for _ in range(2)])

    def times() -> StepTimeModel:
        raise AssertionError("step times are looked at for nothing")

    engine.scheduler.step_budget.times = times
    engine.submit(new_sequence(prompt(400, 9), 4, stop_ids=NO_STOP))
    assert num_prompt_tokens(engine, 0.0) == MOST - 2


def test_without_prompts_and_without_streams_nothing_is_limited() -> None:
    engine, _ = engine_with_times()
    engine.submit(new_sequence(prompt(400, 9), 4, stop_ids=NO_STOP))
    assert num_prompt_tokens(engine, 0.0) == MOST
    begin(engine, stream(0.01))
    assert engine.last_plan.features.num_new_tokens == MOST


def test_a_stream_spends_what_it_has_saved_and_makes_up_for_what_it_waited() -> None:
    engine, _ = engine_with_times()
    begin(engine, stream(0.012))
    engine.submit(new_sequence(prompt(900, 9), 4, stop_ids=NO_STOP))
    usual = num_prompt_tokens(engine, 0.0)
    # One token in 4 ms: 8 ms to spare, of which each step may take an eighth.
    assert num_prompt_tokens(engine, 0.004) == usual + 10
    # Two tokens in 40 ms: 16 ms too late.
    assert num_prompt_tokens(engine, 0.040) == usual - 20
    # So late that no 64 steps without prompts would help: as if it were in time.
    assert num_prompt_tokens(engine, 2.0) == usual


def test_a_short_answer_makes_up_for_what_it_waited_before_it_ends() -> None:
    """As many prompt tokens less as the delay is long, in a quarter of its tokens to come."""
    engine, _ = engine_with_times()
    begin(engine, stream(0.012, max_tokens=10))
    engine.submit(new_sequence(prompt(900, 9), 4, stop_ids=NO_STOP))
    usual = num_prompt_tokens(engine, 0.0)
    # One token in 16 ms, which is 4 ms too late, and 8 are left: 2 ms in each of two steps.
    assert num_prompt_tokens(engine, 0.016) == usual - 20


def test_a_stream_that_arrives_goes_on_while_a_long_prompt_fills_steps() -> None:
    """Its client waits for the next token; the prompt takes many steps."""
    engine, kv = new_engine(60, 4, max_num_batched_tokens=8)
    engine.submit(new_sequence(prompt(80, 60), 4, 2, stop_ids=NO_STOP))
    engine.step()
    arrived = new_sequence(prompt(6), 4, 4, output=(7,), stop_ids=NO_STOP)
    arrive(engine, kv, arrived, 6)
    num_gained = [len(event.token_ids) for _ in range(3) for event in engine.step()]
    assert num_gained == [1, 1, 1]
    assert engine.scheduler.has_work and not engine.scheduler.imported


def test_a_stream_that_arrives_takes_no_place_of_an_older_prompt() -> None:
    engine, kv = new_engine(60, 4, max_num_seqs=2, max_num_batched_tokens=8)
    engine.submit(new_sequence(prompt(80, 60), 4, 2, stop_ids=NO_STOP))
    engine.step()
    older = new_sequence(prompt(5), 4, 2, stop_ids=NO_STOP)
    engine.submit(older)
    arrived = new_sequence(prompt(6), 4, 4, output=(7,), stop_ids=NO_STOP)
    arrive(engine, kv, arrived, 6)
    engine.step()
    assert engine.scheduler.imported == [arrived] and engine.scheduler.waiting == [older]
