"""Simulated engine steps: their times, and runs of equal decode steps computed at once.

Between two events of a worker its decode steps are alike: each running sequence gains a token, and
no sequence is admitted, ends or fills a block. Such steps form a `StepRun`. The sequences advance
together at its end; what the steps teach and report is the same as if each were computed. A step
that differs (a sequence ends, fills a block, or waits for admission) is never part of a run; the
real scheduler plans and applies it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from disagg.engine.engine import Engine
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.step import Sampled, SampledToken, StepPlan
from disagg.time_model import StepFeatures


class StepTimes(Protocol):
    """Step times: a linear model (`StepTimeModel`), or a roofline of the planner."""

    def step_s(self, features: StepFeatures, /) -> float: ...


class TimedRunner:
    """An engine's runner that computes nothing. An answer repeats the prompt's token.

    Attributes:
        num_prompt_tokens: prompt tokens that it has computed so far.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0

    def run(self, plan: StepPlan) -> list[Sampled]:
        self.num_prompt_tokens += plan.features.num_new_tokens
        return [
            SampledToken(sequence.tokens[0])
            if sequence.num_computed + num_tokens == len(sequence.tokens)
            else None
            for sequence, num_tokens in zip(plan.sequences, plan.query_lens, strict=True)
        ]


class StepRun:
    """A step that an engine began at `began_s`, and up to `num_more` further steps like it.

    In each of them every sequence has one more token of context than in the step before.
    """

    def __init__(
        self, features: StepFeatures, times: StepTimes, began_s: float, num_more: int
    ) -> None:
        self.began_s = began_s
        self._features = features
        self.steps_s = [times.step_s(self.features(number)) for number in range(num_more + 1)]
        self.ends_s: list[float] = []
        for step_s in self.steps_s:
            began_s += step_s
            self.ends_s.append(began_s)

    @property
    def num_more(self) -> int:
        return len(self.ends_s) - 1

    def features(self, number: int) -> StepFeatures:
        if not number:
            return self._features
        num_decoding = self._features.num_decoding
        num_context = self._features.num_decode_context + num_decoding * number
        return StepFeatures(0, 0.0, num_decoding, num_context)

    def num_ended(self, now: float) -> int:
        """The number of steps of the run that have ended."""
        return bisect_right(self.ends_s, now)

    def cut(self, now: float) -> None:
        """Remove the steps that have not begun."""
        del self.ends_s[bisect_left(self.ends_s, now) + 1 :]


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
