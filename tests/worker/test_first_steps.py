"""What is known of an engine before its first request is right, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from disagg.engine.engine import Engine
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.worker.first_steps import first_steps
from tests.engine.workload import new_engine


class SlowMachine:
    """A runner on a clock of its own: so much a step, and so much a token."""

    def __init__(self, engine: Engine, step_s: float, token_s: float) -> None:
        self.now = 0.0
        self.busy: Collection[int] = ()  # steps by number that take a second longer
        self._num_steps = 0
        self._runner = engine.runner
        self._costs = step_s, token_s
        engine.runner = self

    def run(self, plan: StepPlan) -> Sequence[Sampled]:
        step_s, token_s = self._costs
        self.now += step_s + token_s * plan.num_new_tokens + (self._num_steps in self.busy)
        self._num_steps += 1
        return self._runner.run(plan)


@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 0.05])
@pytest.mark.parametrize("step_s", [1e-4, 0.01, 0.2])
def test_the_first_long_prompt_is_no_surprise(step_s: float, token_s: float) -> None:
    """An engine counts as stalled after four times of what is predicted, and 3 s."""
    engine, _ = new_engine(64, 16, max_num_batched_tokens=1024)
    machine = SlowMachine(engine, step_s, token_s)
    model = first_steps(engine, lambda: machine.now)
    for num_tokens in (64, 1024):
        truth = step_s + token_s * num_tokens
        assert model.prefill_s(num_tokens) > truth / 4 - 0.5
    assert model.decode_step_s(1, 64) < 4 * (step_s + token_s) + 0.01


def test_a_machine_that_is_busy_for_a_moment_is_not_taken_for_a_slow_one() -> None:
    """A worker that seems slow would get no prompt that could show otherwise."""
    found = []
    for busy in ((), (5, 6, 11)):  # the steps that take long: a prompt, and some of an answer
        engine, _ = new_engine(64, 16, max_num_batched_tokens=1024)
        machine = SlowMachine(engine, 1e-3, 1e-4)
        machine.busy = busy
        found.append(first_steps(engine, lambda machine=machine: machine.now))  # type: ignore[misc]
    assert found[0].coefficients == pytest.approx(found[1].coefficients)


def test_a_decode_is_told_from_a_step() -> None:
    """Of one stream each step has one, and drafts are as many more."""
    engine, _ = new_engine(64, 16, max_num_seqs=16, max_num_batched_tokens=1024)
    machine = SlowMachine(engine, 0.010, 0.001)
    model = first_steps(engine, lambda: machine.now)
    for num_decoding in (1, 5, 16):
        truth = pytest.approx(0.010 + 0.001 * num_decoding, rel=0.1)
        assert model.decode_step_s(num_decoding, 0) == truth


def test_nothing_is_left_of_it() -> None:
    engine, _ = new_engine(64, 16)
    lookup = engine.scheduler.drafting.proposer = PromptLookup(num_tokens=2, match_length=1)
    first_steps(engine, lambda: 0.0)
    assert not engine.has_work and engine.pool.enable_prefix_caching
    assert engine.scheduler.drafting.proposer is lookup and not engine.scheduler.num_drafted
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.pool.hashes() and not engine.pool.take_events()
    engine.check()


@pytest.mark.parametrize("num_blocks", [1, 2, 8])
def test_a_small_cache_is_no_obstacle(num_blocks: int) -> None:
    engine, _ = new_engine(num_blocks, 4)
    first_steps(engine, lambda: 0.0)
    assert engine.pool.num_free == num_blocks
    engine.check()
