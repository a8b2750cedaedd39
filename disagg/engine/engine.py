"""The engine advances sequences. Knows nothing of requests, workers, transfers or threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import NamedTuple, Protocol

from disagg.adapters import Adapter
from disagg.blocks import BlockHash
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import (
    AsyncRunner,
    Choose,
    Results,
    Runner,
    SequencesFailed,
    StepPlan,
    TokenEvent,
)
from disagg.errors import DeadlineExceeded, DisaggError, RequestError, request_failed
from disagg.messages import WorkerStatus
from disagg.time_model import StepFeatures

_IDLE = StepPlan((), (), 0, StepFeatures())
SaveEvicted = Callable[[list[tuple[int, BlockHash]]], None]


class _Step(NamedTuple):
    """A step that was launched, or one that runs when its results are read, as on a CPU."""

    plan: StepPlan
    results: Results
    may_be_followed: bool  # whether a next step may be launched before its results are read


class _Launched(NamedTuple):
    """A step whose forward pass was launched, and the choice of its tokens was not."""

    plan: StepPlan
    choose: Choose


class AdapterGate(Protocol):
    """Gives sequences their LoRA adapters, before they enter the engine."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the sequence has its adapter's slot; see `Engine.is_ready`."""
        ...

    def load(self, adapter: Adapter) -> None:
        """Begin to load an adapter, if there is room, so that its first request need not wait."""
        ...

    def watch(self, is_running: Callable[[Sequence], bool]) -> None:
        """Have `is_running` say which sequences still need their slots."""
        ...

    def report(self) -> tuple[tuple[str, ...], float]:
        """Digests of the adapters on the device, and measured seconds to load another."""
        ...

    def close(self) -> None:
        """Load nothing more."""
        ...


class Engine:
    """A scheduler and the runner that executes its plans; owned by one thread.

    Args:
        scheduler: plans steps.
        runner: executes plans.
        save_evicted: called with evicted blocks while their bytes are still intact, so that host
            memory and the store can keep them.
        grammars: the compiled grammars, shared with the runner.
        adapters: the LoRA adapters of sequences, if they are enabled.
        launcher: the runner, if its device computes asynchronously: steps are then planned ahead.
        begin_thread: called first in the thread that owns the engine, if that is not the one that
            has built it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        save_evicted: SaveEvicted | None = None,
        grammars: Grammars | None = None,
        launcher: AsyncRunner | None = None,
        adapters: AdapterGate | None = None,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.save_evicted = save_evicted
        self.grammars = grammars
        self.launcher = launcher
        self.adapters = adapters
        self.begin_thread = begin_thread
        self.last_plan = _IDLE  # the plan applied last, or the running one
        self.is_stuck = False  # the last step had sequences but could advance none
        self._under_way: _Step | None = None  # a step that was planned ahead
        self._ended: list[TokenEvent] = []  # events between two steps; the next step reports them
        self._earliest_deadline_s = math.inf  # a lower bound: not raised when a sequence ends

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.is_under_way or bool(self._ended)

    @property
    def is_under_way(self) -> bool:
        """Whether the device is computing a step while no call of `step` runs."""
        return self._under_way is not None

    @property
    def is_short(self) -> bool:
        """Whether a waiting sequence found too few blocks.

        If so, holds of prefixes and old holds should end.
        """
        return self.scheduler.is_short

    def step(self) -> list[TokenEvent]:
        """Plan and run one step. Returns its events; empty if there is nothing to report."""
        ended, self._ended = self._ended, []
        try:
            return ended + self._step()
        except SequencesFailed as failed:  # no sequence has advanced: the others are planned again
            self.last_plan = _IDLE
            self._end_broken(failed)
            if self.pool.groups.num_states:
                self.scheduler.begin_again()
            return ended

    def _step(self) -> list[TokenEvent]:
        step = self._under_way or self._begin(self.scheduler.plan())
        self.last_plan = plan = step.plan
        self.is_stuck = self.scheduler.has_work and not plan.sequences
        if not plan.sequences:
            return []
        self._under_way, following, failed = None, None, None
        try:
            following = self._launch_following(step)
        except SequencesFailed as error:
            failed = error
        events = self.scheduler.apply(plan, step.results())
        try:
            if following is not None:
                self._under_way = _Step(following.plan, following.choose(), may_be_followed=True)
        except SequencesFailed as error:
            failed = error
        if failed is not None:  # not before, since `plan` has tokens for them
            self.scheduler.drop_following()
            self._end_broken(failed)
        return events

    def _end_broken(self, failed: SequencesFailed) -> None:
        for sequence, error in failed.errors.items():
            if sequence in self.scheduler:
                self.end(sequence, request_failed(error))

    def _begin(self, plan: StepPlan) -> _Step:
        """Begin a step while no other is under way."""
        if self.launcher is None or plan.reads_prompts or not plan.sequences:
            self._give_up_evicted()
            return _Step(plan, partial(self.runner.run, plan), may_be_followed=False)
        return _Step(plan, self._launch(plan).choose(), may_be_followed=True)

    def _launch_following(self, step: _Step) -> _Launched | None:
        """Launch the step after `step` before its results are known, if possible."""
        following = self.scheduler.plan_following(step.plan) if step.may_be_followed else None
        return None if following is None else self._launch(following)

    def _launch(self, plan: StepPlan) -> _Launched:
        assert self.launcher is not None
        self._give_up_evicted()
        return _Launched(plan, self.launcher.launch(plan))

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the sequence's grammar and adapter, if it has them, are ready for it.

        If not, call again later. What is ready for a sequence stays so.

        Raises:
            GrammarError: the grammar cannot be compiled.
            Overloaded: too many grammars are being compiled.
            DisaggError: the adapter cannot be loaded.
        """
        return self._has_grammar(sequence) and self._has_adapter(sequence)

    def _has_adapter(self, sequence: Sequence) -> bool:
        if sequence.adapter is None:
            return True
        if self.adapters is None:
            raise RequestError(
                f"This worker cannot use the adapter {sequence.adapter.name!r}, because LoRA is not"
                " enabled (--enable-lora)."
            )
        return self.adapters.is_ready(sequence)

    def _has_grammar(self, sequence: Sequence) -> bool:
        grammar, grammars = sequence.sampling.grammar, self.grammars
        if grammar is None or grammars is None or sequence.grammar_state is not None:
            return True
        if not grammars.is_ready(grammar):
            return False
        self._follow_grammar(sequence)
        return True

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence to be computed here from its first token on.

        Waits for its grammar to be compiled unless `is_ready` was true before. With an adapter it
        must have been.

        Raises:
            RequestError: the sequence can never fit, or is inconsistent.
        """
        self._check_adapter(sequence)
        self._follow_grammar(sequence)
        self.scheduler.submit(sequence)
        self._watch(sequence)

    def join(self, sequence: Sequence) -> None:
        """Queue a sequence whose first `num_computed` tokens have their KV in its `block_ids`.

        Raises:
            RequestError: as `submit`; the blocks stay the caller's.
        """
        self._check_adapter(sequence)
        self._follow_grammar(sequence)
        self.scheduler.join(sequence)
        self._watch(sequence)

    def reserve(self, num_blocks: int, arrival: tuple[int, int] | None = None) -> list[int] | None:
        """Allocate blocks for imported KV. Returns None while running or older sequences need them.

        See `Scheduler.reserve`. The caller may write to the blocks at once.
        """
        block_ids = self.scheduler.reserve(num_blocks, arrival)
        self._give_up_evicted()
        return block_ids

    def release(self, block_ids: SequenceOf[int], *, is_spent: bool = False) -> None:
        """Release a sequence's blocks, as `BlockPool.release` does.

        The blocks become free when the running steps have ended, since the device may still write
        to them.
        """
        self.scheduler.release(block_ids, is_spent=is_spent)

    def abort(self, request_id: str) -> Sequence | None:
        """Remove a sequence and release its blocks, without an event. None if it is unknown."""
        return self.scheduler.remove(request_id)

    def end(self, sequence: Sequence, error: DisaggError) -> None:
        """Report an error as the last event of a sequence, and remove it from the engine.

        If the sequence was refused because its id is in use, the sequence that uses the id goes on.
        """
        if sequence in self.scheduler:
            self.scheduler.remove(sequence.request_id)
        self._ended.append(TokenEvent(sequence, error=error))

    def end_all(self, error: DisaggError) -> None:
        for sequence in self.scheduler.sequences():
            self.end(sequence, error)

    def abandon(self, of_step: DisaggError, of_others: DisaggError) -> list[TokenEvent]:
        """Return the last events of all sequences, after the engine broke in the middle of a step.

        Unlike `end_all` it does not rely on the engine's state, so it releases no blocks.

        Args:
            of_step: the error of sequences that were in a running step, which they may have broken.
            of_others: the error of those that waited for one.
        """
        in_steps = {*self.last_plan.sequences, *self.scheduler.running}
        events = self._ended + [
            TokenEvent(sequence, error=of_step if sequence in in_steps else of_others)
            for sequence in self.scheduler.abandon()
        ]
        self._ended, self._under_way = [], None
        return events

    def expire(self, now: float) -> None:
        """End the sequences whose deadline, in Unix seconds, has passed."""
        if now < self._earliest_deadline_s:
            return
        self._earliest_deadline_s = math.inf
        for sequence in self.scheduler.sequences():
            if now < sequence.deadline_unix_s:
                self._watch(sequence)
                continue
            late_s = now - sequence.deadline_unix_s
            message = (
                f"The request's deadline passed {late_s:.3f} s ago, after"
                f" {sequence.num_output_tokens} of at most {sequence.sampling.max_tokens} tokens."
            )
            self.end(sequence, DeadlineExceeded(message))

    def status(self) -> WorkerStatus:
        """The engine's load, from which routers predict seconds.

        The worker adds transfers, holds and step costs.
        """
        scheduler, pool = self.scheduler, self.pool
        queues, running = scheduler.queues, scheduler.running
        prefills: list[Sequence] = []
        if queues.num_left > len(running):  # some sequence has more than one token to compute
            prefills = [each for each in running if each.num_uncomputed > 1]
        num_uncomputed = sum([each.num_uncomputed for each in prefills])
        return WorkerStatus(
            num_running=len(running),
            num_waiting=len(scheduler.waiting) + len(scheduler.imported),
            num_uncomputed_tokens=queues.num_queued_tokens + num_uncomputed,
            num_context_tokens=queues.num_computed,
            num_free_blocks=pool.groups.num_whole(pool.num_free),
            num_blocks=pool.groups.num_whole(pool.num_blocks),
            num_drafted=scheduler.num_drafted,
            num_accepted=scheduler.num_accepted,
            num_preempted=scheduler.num_preempted,
            num_prefilling=len(prefills),
            num_leaving=sum([each.hand_over for each in prefills]),
            num_corrupted=scheduler.num_corrupted,
            num_drafts=scheduler.drafting.num_drafts,
            num_accepted_at=tuple(scheduler.drafting.num_accepted_at),
        )

    def check(self, holders: Iterable[SequenceOf[int]] = ()) -> None:
        """Recount every block and sequence.

        Args:
            holders: the blocks that other parts of the worker hold.

        Raises:
            AssertionError: names the first difference.
        """
        self.scheduler.check()
        self.pool.check([*self.scheduler.holders(), *holders])

    def _check_adapter(self, sequence: Sequence) -> None:
        """No sequence may be computed without its adapter."""
        if sequence.adapter is not None and sequence.adapter_slot < 0:
            raise RequestError(f"{sequence} has no slot of its adapter.")

    def _follow_grammar(self, sequence: Sequence) -> None:
        grammar, grammars = sequence.sampling.grammar, self.grammars
        if grammar is not None and grammars is not None and sequence.grammar_state is None:
            sequence.grammar_state = grammars.follow(grammar, sequence.num_prompt_tokens)

    def _watch(self, sequence: Sequence) -> None:
        self._earliest_deadline_s = min(self._earliest_deadline_s, sequence.deadline_unix_s)

    def _give_up_evicted(self) -> None:
        evicted = self.pool.take_evicted()
        if evicted and self.save_evicted is not None:
            self.save_evicted(evicted)
