"""Async scheduling: plans and launches a step before the results of the running one are read.

Otherwise a GPU would idle while Python applies a step and plans the next. As long as no sequence is
admitted or preempted, the next plan does not depend on the sampled tokens: a sequence that samples
in the running step decodes in the next one, with a token that only the device knows; a sequence in
the middle of a prompt goes on with it. If the next plan could differ (a sequence may be admitted,
has a draft or needs the host, or blocks are short), the running step is applied first.

If a sequence turns out to have ended, its row in the later step is wasted: the result is ignored,
and the blocks to which the row writes are freed when that step has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.chunks import Chunks
from disagg.engine.sched.queues import Queues
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.engine.sched.step_budget import StepBudget
from disagg.time_model import StepFeatures


class ProjectedPlan:
    """The state of a plan's sequences after it is applied, if none of them ends early.

    decodes: sequences that will have one token to compute, which the plan samples.
    growing: the sequences of `decodes` that need a new block for that token.
    prefills: sequences in the middle of a prompt, with the position where they continue.
    num_here: number of the plan's sequences that are still here, including those that will have
        ended.

    Args:
        gone: the sequences that have ended while the plan ran.
    """

    __slots__ = ("decodes", "growing", "num_here", "prefills")

    def __init__(self, plan: StepPlan, gone: set[Sequence]) -> None:
        self.num_here = len(plan.sequences) - len(gone.intersection(plan.sequences))
        self.decodes: list[Sequence] = []
        self.growing: list[Sequence] = []
        self.prefills: list[tuple[Sequence, int]] = []
        for sequence, num_tokens in zip(plan.sequences, plan.query_lens, strict=True):
            if sequence in gone:
                continue
            end, num_known = sequence.num_computed + num_tokens, len(sequence.tokens)
            if end < num_known:
                self.prefills.append((sequence, end))
            elif num_known + 1 < sequence.max_num_tokens and not sequence.hand_over:
                self.decodes.append(sequence)
                if num_known == sequence.num_slots:
                    self.growing.append(sequence)

    @property
    def starts(self) -> list[int]:
        """The position of each decode's next token."""
        return [len(sequence.tokens) for sequence in self.decodes]


def _continued(plan: StepPlan) -> StepPlan:
    """The step after a plan whose sequences all decode, and all go on."""
    num_seqs = plan.num_decodes
    num_context = plan.features.num_decode_context + num_seqs
    return StepPlan(
        plan.sequences,
        plan.query_lens,
        num_seqs,
        StepFeatures(0, 0, num_seqs, num_context),
        num_unread=num_seqs,
        continues=True,
    )


class LateBlocks(NamedTuple):
    block_ids: SequenceOf[int]
    is_spent: bool  # see `BlockPool.release`


class AsyncScheduling:
    """The steps that were planned ahead: at most one after the step that is applied next.

    late_blocks: blocks that were released while such a step may still write to them. No sequence
        may get them before the step has ended.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.late_blocks: list[LateBlocks] = []
        self._pool = pool
        self._num_planned = 0
        self._gone: set[Sequence] = set()
        self._near_budget: set[Sequence] = set()  # the host must check their next tokens

    @property
    def is_under_way(self) -> bool:
        return self._num_planned > 0

    def follow(
        self,
        plan: StepPlan,
        queues: Queues,
        step_budget: StepBudget,
        needs_host: Callable[[Sequence], bool],
    ) -> tuple[StepPlan | None, list[Sequence], int]:
        """Plan the step after `plan` before `plan` is applied.

        The step admits no sequence. Returns the step (None if `plan` must be applied first), the
        sequences that need a block for it, and the number of tokens that are left of its budget.

        Args:
            needs_host: whether a sequence that runs but is not part of `plan` needs the host.
        """
        if self._near_budget and not self._near_budget.isdisjoint(plan.sequences):
            return None, [], 0
        running = queues.running
        after = ProjectedPlan(plan, self._gone)
        if len(after.decodes) == plan.num_decodes == len(plan.sequences) == len(running):
            return _continued(plan), after.growing, step_budget.most - plan.num_decodes
        prefills = after.prefills
        if after.num_here < len(running):
            planned = set(map(id, plan.sequences))
            others = [sequence for sequence in running if id(sequence) not in planned]
            if any(map(needs_host, others)):
                return None, [], 0
            prefills += [(sequence, sequence.num_computed) for sequence in others]
        if not (after.decodes or prefills):
            return None, [], 0
        num_before = prefills[0][1] if prefills else None
        starts = after.starts
        num_context = sum(starts) + len(starts)
        budget = step_budget.of_prompts(after.decodes, num_context, num_before)
        chunks = Chunks(self._pool, budget, running, num_context)
        for sequence, start in prefills:
            chunks.add(sequence, start)
        return chunks.step_plan(after.decodes, starts), after.growing, chunks.budget

    def begin(self) -> None:
        """Record that a step was planned ahead."""
        self._num_planned += 1

    def drop(self) -> None:
        """Record that the step that was planned last is not launched."""
        self._num_planned -= 1

    def watch_thinking(self, sequence: Sequence) -> None:
        """Check the reasoning budget of a sequence. Called once per block (see `Sequence`).

        Until the next check the sequence gains a block of tokens, and the step that was planned
        ahead samples one more.
        """
        sequence.watch_thinking(self._pool.block_size + 2)
        (self._near_budget.add if sequence.needs_host else self._near_budget.discard)(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Record that a sequence has ended; a running step may still have a row for it."""
        self._near_budget.discard(sequence)
        if self.is_under_way:
            self._gone.add(sequence)

    def release(self, block_ids: SequenceOf[int], *, is_spent: bool = False) -> None:
        """As `BlockPool.release`, but after the last running step that may write to the blocks."""
        if not self.is_under_way:
            self._pool.release(block_ids, is_spent=is_spent)
        elif block_ids:
            self.late_blocks.append(LateBlocks(block_ids, is_spent))

    def end(self) -> set[Sequence]:
        """Record that the oldest planned step has ended on the device.

        Frees the blocks to which only that step could write. Returns the sequences that ended
        after it was planned.
        """
        self._num_planned -= 1
        late, self.late_blocks = self.late_blocks, []
        for block_ids, is_spent in late:
            self._pool.release(block_ids, is_spent=is_spent)
        gone, self._gone = self._gone, set()
        return gone
