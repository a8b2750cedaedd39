"""Threads of a step, chosen by a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.device.step_threads import CONTEXT, LONG_S, NUM_ROUNDS, SIZES, StepThreads
from disagg.time_model import StepFeatures
from tests.grids import examples

Cost = Callable[[int, int], float]  # seconds of a step of so many sequences with so many threads


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measured(most: int, cost: Cost) -> tuple[StepThreads, list[tuple[int, int]]]:
    """What was chosen, and the (size, threads) of all steps that were computed for it."""
    threads, steps, now_s = StepThreads(most), [], 0.0

    def compute(size: int) -> None:
        nonlocal now_s
        steps.append((size, torch.get_num_threads()))
        now_s += cost(*steps[-1])

    threads.measure(compute, lambda: now_s)
    return threads, steps


def used_for(threads: StepThreads, features: StepFeatures) -> int:
    threads.use_for(features)
    return torch.get_num_threads()


def decodes(num_seqs: int, context: int = CONTEXT) -> StepFeatures:
    return StepFeatures(num_decoding=num_seqs, num_decode_context=num_seqs * context)


def shared_work(size: int, threads: int) -> float:
    """1 ms for each sequence, shared out, and 2 ms to wake each other thread."""
    return 1e-3 * size / threads + 2e-3 * (threads - 1)


def test_few_sequences_are_computed_by_one_thread_and_many_by_all() -> None:
    threads, _ = measured(2, shared_work)
    assert threads.limits == [(1, 1), (2, 1), (4, 1)]
    assert [used_for(threads, decodes(n)) for n in (1, 4, 5, 8, 400)] == [1, 1, 2, 2, 2]


def test_the_choice_lies_between_one_and_all_where_that_is_fastest() -> None:
    threads, _ = measured(8, lambda size, threads: 1e-3 * size / threads + 1e-3 * threads)
    assert [used_for(threads, decodes(n)) for n in SIZES] == [1, 1, 2, 2, 4, 4]
    assert used_for(threads, decodes(33)) == 8


def test_tokens_of_prompts_and_long_contexts_count() -> None:
    threads, _ = measured(2, shared_work)
    assert used_for(threads, decodes(1, 4 * CONTEXT)) == 1
    assert used_for(threads, decodes(1, 4 * CONTEXT + 1)) == 2
    assert used_for(threads, StepFeatures(num_new_tokens=4, num_attended=10)) == 1
    assert used_for(threads, StepFeatures(num_new_tokens=64, num_attended=2080)) == 2
    assert used_for(threads, StepFeatures(4, 4 * 2 * CONTEXT)) == 2
    assert used_for(threads, StepFeatures(4, 10, 1, 20)) == 2


def test_a_step_that_takes_long_is_run_once_and_gets_all_threads() -> None:
    threads, steps = measured(4, lambda size, threads: 2 * LONG_S / threads * 4)
    assert threads.limits == [] and steps == [(1, 4)]


def test_more_threads_must_be_worth_it() -> None:
    assert measured(2, lambda size, threads: 1.04e-3 - 4e-5 * (threads - 1))[0].limits[-1] == (
        SIZES[-1],
        1,
    )
    assert measured(2, lambda size, threads: 1.1e-3 - 1e-4 * (threads - 1))[0].limits == []


def test_one_slow_round_decides_nothing() -> None:
    num_steps = 0

    def disturbed(size: int, threads: int) -> float:
        nonlocal num_steps
        num_steps += 1
        return shared_work(size, threads) + (0.03 if num_steps % NUM_ROUNDS < 2 else 0)

    assert measured(2, disturbed)[0].limits == measured(2, shared_work)[0].limits


def test_a_worker_with_one_thread_measures_nothing() -> None:
    threads, steps = measured(1, shared_work)
    assert (threads.limits, steps) == ([], [])
    torch.set_num_threads(2)
    assert used_for(threads, decodes(1)) == 2  # as others set it


@examples(20)
@given(
    most=st.integers(1, 12),
    costs=st.dictionaries(
        st.tuples(st.sampled_from(SIZES), st.integers(1, 12)), st.floats(1e-6, 2 * LONG_S)
    ),
)
def test_larger_steps_never_get_fewer_threads(
    most: int, costs: dict[tuple[int, int], float]
) -> None:
    threads, _ = measured(most, lambda size, number: costs.get((size, number), 1e-3))
    assert torch.get_num_threads() == most or most == 1
    chosen = [used_for(threads, decodes(n)) if threads.limits else most for n in range(1, 40)]
    assert all(1 <= few <= many <= most for few, many in pairwise(chosen))
    assert chosen[-1] == most
