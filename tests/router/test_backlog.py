"""A backlog is what comes of playing the steps of a worker one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.costs import Prompt, prefill_cost
from disagg.router.worker_view import Backlog, RequestLoad, WorkerView
from disagg.time_model import CHUNK_TOKENS, StepTimeModel
from tests.router.fakes import COSTS, make_record, make_status

TIMES = StepTimeModel.from_costs(COSTS)


@given(
    num_queued=st.integers(0, 5000),
    num_new=st.integers(1, 5000),
    num_waiting=st.integers(0, 5),
    num_decoding=st.sampled_from([0, 1, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2000]),
)
def test_a_prompt_waits_for_the_steps_before_it(
    num_queued: int, num_new: int, num_waiting: int, num_decoding: int
) -> None:
    num_context = 100 * num_decoding
    status = make_status(
        num_running=num_decoding,
        num_waiting=num_waiting,
        num_uncomputed_tokens=num_queued,
        num_context_tokens=num_context,
    )
    worker = WorkerView.from_status(make_record("p0"), status, RequestLoad(), TIMES)
    cost = prefill_cost(worker, Prompt(num_new), 0)

    num_at_once = max(1, CHUNK_TOKENS - num_decoding)
    per_step_s, _, _, _, _, per_prompt_step_s = TIMES.coefficients
    decode_s = TIMES.decode_step_s(num_decoding, num_context)
    bare_s = (decode_s or per_step_s) + per_prompt_step_s
    queued_s = TIMES.prompts_s(num_queued, 0, num_waiting)
    expected_s, num_left = queued_s + TIMES.prompts_s(num_new), num_queued + num_new
    if num_queued or num_decoding:  # a step is under way, which the new prompt came too late for
        expected_s += bare_s if num_queued else decode_s
        num_left -= min(num_queued, num_at_once)
    while num_left > 0:
        expected_s += bare_s
        num_left -= num_at_once
    assert cost.first_token_s == pytest.approx(expected_s)


def test_a_worker_without_work_makes_nobody_wait() -> None:
    backlog = Backlog.predict(TIMES, 0, 0, 0, 0)
    assert (backlog.num_prompts, backlog.under_way_s, backlog.later_s) == (0, 0.0, 0.0)
    assert backlog.step_s == TIMES.prompt_step_s
    assert Backlog.predict(TIMES, 2, 100, 0, 0).num_prompts == 3  # two wait and one is computed
