"""Simulated engine steps: their times, and runs of equal decode steps computed at once.

Between two events of a worker its decode steps are alike: each running sequence gains a token, and
no sequence is admitted, ends or fills a block. Such steps form a `StepRun`. One formula gives their
times, and the sequences advance together at its end. A step that differs (a sequence ends, fills a
block, or waits for admission) is never part of a run; the real scheduler plans and applies it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from disagg.engine.engine import Engine
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Sampled, SampledToken, StepPlan
from disagg.time_model import StepFeatures
from disagg.tools.sim.answers import SimulatedConfidence


class StepTimes(Protocol):
    """Step times: a linear model (`StepTimeModel`), or a roofline of the planner."""

    def step_s(self, features: StepFeatures, /) -> float: ...

    @property
    def per_context_s(self) -> float:
        """Seconds that one more token in the context of a decoding sequence adds to a step."""


class TimedRunner:
    """An engine's runner that computes nothing. `answers` makes the tokens.

    Attributes:
        num_prompt_tokens: prompt tokens that it has computed so far.
    """

    def __init__(self, model: str, sureness: SimulatedConfidence) -> None:
        self.num_prompt_tokens = 0
        self._model = model
        self._sureness = sureness

    def run(self, plan: StepPlan) -> list[Sampled]:
        self.num_prompt_tokens += plan.features.num_new_tokens
        sampled: list[Sampled] = []
        for sequence, num_tokens in zip(plan.sequences, plan.query_lens, strict=True):
            num_ahead = sequence.num_computed + num_tokens - len(sequence.tokens)
            if num_ahead < 0:
                sampled.append(None)
            elif num_ahead:
                sampled.append(tuple(self._token(sequence, i) for i in range(num_ahead + 1)))
            else:
                sampled.append(self._token(sequence, 0))
        return sampled

    def _token(self, sequence: Sequence, num_ahead: int) -> SampledToken:
        sampling = sequence.sampling
        if sampling.logprobs is not None:
            num_output_tokens = sequence.num_output_tokens + num_ahead
            if sampling.logprobs_until is None or num_output_tokens < sampling.logprobs_until:
                return self._sureness.token(self._model, sequence, num_ahead)
        return SampledToken(sequence.tokens[0])


class StepRun:
    """A step that an engine began at `began_s`, and up to `num_more` further steps like it."""

    def __init__(
        self, features: StepFeatures, times: StepTimes, began_s: float, num_more: int
    ) -> None:
        self.features = features
        self.began_s = began_s
        self.num_more = num_more
        self._step_s = times.step_s(features)
        self._first_end_s = began_s + self._step_s
        # In each step every sequence has one more token of context than in the step before.
        self._longer_s = times.per_context_s * features.num_decoding

    @property
    def ends_s(self) -> float:
        return self._end_s(self.num_more)

    @property
    def last_step_s(self) -> float:
        return self._step_s + self._longer_s * self.num_more

    @property
    def last_features(self) -> StepFeatures:
        if not self.num_more:
            return self.features
        num_context = self.features.num_decode_context
        num_decoding = self.features.num_decoding
        return StepFeatures(0, 0, num_decoding, num_context + num_decoding * self.num_more)

    def num_ended(self, now: float) -> int:
        """The number of steps of the run that have ended."""
        return bisect_right(range(self.num_more + 1), now, key=self._end_s)

    def cut(self, now: float) -> None:
        """Remove the steps that have not begun."""
        self.num_more = bisect_left(range(self.num_more), now, key=self._end_s)

    def _end_s(self, num_more: int) -> float:
        longer_s = self._longer_s * (num_more * (num_more + 1) // 2)
        return self._first_end_s + self._step_s * num_more + longer_s


def num_alike(engine: Engine) -> int:
    """The number of further steps that would do the same as the last one."""
    scheduler = engine.scheduler
    plan = engine.last_plan
    if scheduler.waiting or scheduler.imported or plan.features.num_new_tokens or plan.num_ahead:
        return 0
    least = 1 << 62
    for sequence in scheduler.running:
        num_tokens, num_computed = len(sequence.tokens), sequence.num_computed
        if num_tokens - num_computed != 1 or sequence.hand_over:
            return 0
        least = min(
            least,
            sequence.max_num_tokens - num_tokens - 1,
            sequence.num_slots - num_tokens,
            sequence.publish_at - num_computed - 1,
        )
    return max(0, least) if scheduler.running else 0


def move_on(scheduler: Scheduler, num_steps: int) -> None:
    """Advance every running sequence by `num_steps` steps that are alike."""
    num_tokens = num_steps * len(scheduler.running)
    scheduler.queues.advance(num_tokens, num_tokens)
    for sequence in scheduler.running:
        sequence.num_computed += num_steps
        sequence.tokens += sequence.tokens[:1] * num_steps
