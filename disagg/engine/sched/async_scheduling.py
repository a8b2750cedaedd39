"""Async scheduling: plans and launches a step before the results of the running one are read.

Otherwise a GPU would idle while Python applies a step and plans the next. As long as no sequence is
admitted or preempted, the next plan does not depend on the sampled tokens: a sequence that samples
in the running step decodes in the next one, with a token that only the device knows; a sequence in
the middle of a prompt goes on with it. The masks of sequences that need the host are made when the
running step is applied, while the device computes the next one's logits. How many tokens of a draft
are right is known only then, so a sequence with a draft takes part in every other step, as one
whose draft is made from all of its tokens. If the next plan could differ (a sequence may be
admitted, blocks are short, a prompt is scored), or many sequences have drafts, the running step is
applied first.

If a sequence turns out to have ended, its row in the later step is wasted: the result is ignored,
and the blocks to which the row writes are freed when that step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import grow
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
        ended, those with a draft, and those that rest.

    Args:
        gone: the sequences that have ended while the plan ran.
        resting: those that take no part in the step after it.
    """

    __slots__ = ("decodes", "growing", "num_here", "prefills")

    def __init__(
        self, plan: StepPlan, gone: set[Sequence], resting: SequenceOf[Sequence] = ()
    ) -> None:
        n, sequences = plan.num_decodes, plan.sequences
        self.num_here = len(sequences) - len(gone.intersection(sequences))
        self.prefills: list[tuple[Sequence, int]] = []
        sampling = [*sequences[:n]]
        for sequence, num_tokens in zip(sequences[n:], plan.query_lens[n:], strict=True):
            end = sequence.num_computed + num_tokens
            if end >= len(sequence.tokens):
                sampling.append(sequence)
            elif sequence not in gone:
                self.prefills.append((sequence, end))
        if left_out := gone.union(resting):
            sampling = [sequence for sequence in sampling if sequence not in left_out]
        # A draft is verified in this step, or in the step after the next.
        self.decodes = [
            each
            for each in sampling
            if len(each.tokens) + 1 < each.max_num_tokens and not (each.hand_over or each.draft)
        ]
        self.growing = [each for each in self.decodes if len(each.tokens) == each.num_slots]

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

    @property
    def is_under_way(self) -> bool:
        return self._num_planned > 0

    def follow(
        self,
        plan: StepPlan,
        queues: Queues,
        step_budget: StepBudget,
        resting: SequenceOf[Sequence] = (),
    ) -> tuple[StepPlan | None, list[Sequence], int]:
        """Plan the step after `plan` before `plan` is applied.

        The step admits no sequence. Returns the step (None if `plan` must be applied first), the
        sequences that need a block for it, and the number of tokens that are left of its budget.

        Args:
            resting: sequences of `plan` that take no part in the step.
        """
        running = queues.running
        after = ProjectedPlan(plan, self._gone, resting)
        if len(after.decodes) == plan.num_decodes == len(plan.sequences) == len(running):
            return _continued(plan), after.growing, step_budget.most - plan.num_decodes
        prefills, returning = after.prefills, list[Sequence]()
        if after.num_here < len(running):
            planned = set(map(id, plan.sequences))
            others = [sequence for sequence in running if id(sequence) not in planned]
            prefills += [(each, each.num_computed) for each in others if each.num_uncomputed > 1]
            returning = [each for each in others if each.num_uncomputed == 1]
        if not (after.decodes or prefills or returning):
            return None, [], 0
        if not grow(self._pool, [e for e in returning if len(e.tokens) > e.num_slots]):
            return None, [], 0
        num_before = prefills[0][1] if prefills else None
        starts = after.starts
        num_context = sum(starts) + len(starts)
        budget = step_budget.of_prompts(
            after.decodes + returning,
            num_context + sum(len(each.tokens) for each in returning),
            num_before,
        )
        has_prompts = bool(prefills)
        chunks = Chunks(self._pool, budget, running, num_context, has_prompts=has_prompts)
        for sequence in returning:
            chunks.budget += 1  # `of_prompts` has subtracted one token of each
            chunks.add(sequence, sequence.num_computed)
        for sequence, start in prefills:
            chunks.add(sequence, start)
        following = chunks.step_plan(after.decodes, starts)
        if following.reads_prompts or not following.sequences:
            return None, [], 0
        return following, after.growing, chunks.budget

    def begin(self) -> None:
        """Record that a step was planned ahead."""
        self._num_planned += 1

    def forget(self, sequence: Sequence) -> None:
        """Record that a sequence has ended; a running step may still have a row for it."""
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
