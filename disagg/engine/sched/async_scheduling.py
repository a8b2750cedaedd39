"""Async scheduling: plans and launches a step before the results of the running one are read.

Otherwise a GPU would idle while Python applies a step and plans the next. As long as no sequence is
admitted or preempted, the next plan does not depend on the sampled tokens: a sequence that samples
in the running step decodes in the next one, with a token that only the device knows; a sequence in
the middle of a prompt goes on with it. If the next plan could differ (a sequence may be admitted,
has a draft or needs the host, or blocks are short), the running step is applied first.

A sequence that turns out to have ended has wasted its row in the later step: the result is ignored,
and the blocks to which the row writes are freed when that step has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import compress
from operator import attrgetter, is_
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

    decodes, starts: sequences that will have one token to compute, which the plan samples; and the
        position of that token.
    growing: those of `decodes` that need a block for it.
    prefills: sequences in the middle of a prompt, with the position where they continue.
    num_here: sequences of the plan that are still here, including those that will have ended.
    num_context: tokens of the decodes.
    """

    __slots__ = ("decodes", "growing", "num_context", "num_here", "prefills", "starts")

    def __init__(
        self,
        plan: StepPlan,
        by_id: Mapping[str, Sequence] | None,
        reaching: SequenceOf[Sequence],
    ) -> None:
        """
        Args:
            by_id: the sequences that have not ended while the plan ran; None: all of its own.
            reaching: the sequences that reach a milestone with it, if they decode in it.
        """
        is_here = [True] * len(plan.sequences)
        if by_id is not None:
            found = map(by_id.get, map(attrgetter("request_id"), plan.sequences))
            is_here = [*map(is_, found, plan.sequences)]
        self.num_here = sum(is_here)
        decodes = [*compress(plan.sequences[: plan.num_decodes], is_here)]
        if ending := set(filter(_ends_next, reaching)):
            decodes = [each for each in decodes if each not in ending]
        self.decodes = decodes
        self.starts = [each.num_computed + 1 for each in decodes]
        self.growing = growing_next(reaching)
        self.prefills: list[tuple[Sequence, int]] = []
        for i in range(plan.num_decodes, len(is_here)):
            sequence = plan.sequences[i]
            start = sequence.num_computed + plan.query_lens[i]
            if not is_here[i]:
                continue
            if start < len(sequence.tokens):
                self.prefills.append((sequence, start))
            elif not _ends_next(sequence):
                self.decodes.append(sequence)
                self.starts.append(start)
                if start == sequence.num_slots:
                    self.growing.append(sequence)
        self.num_context = sum(self.starts) + len(self.starts)


def all_go_on(plan: StepPlan, reaching: SequenceOf[Sequence]) -> bool:
    """Whether all sequences of a plan decode in this step and in the next. None of them has ended.

    Args:
        reaching: as for `ProjectedPlan`.
    """
    return plan.num_decodes == len(plan.sequences) and not any(map(_ends_next, reaching))


def continued(plan: StepPlan) -> StepPlan:
    """The step after a plan whose sequences all go on."""
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


def growing_next(reaching: SequenceOf[Sequence]) -> list[Sequence]:
    """Sequences that need a block for their token after the next. Args: see `all_go_on`."""
    return [
        each
        for each in reaching
        if each.num_computed + 1 == each.num_slots and not _ends_next(each)
    ]


def _ends_next(sequence: Sequence) -> bool:
    """Whether it ends or is handed over with its next token, whichever token that is."""
    return len(sequence.tokens) + 1 >= sequence.max_num_tokens or sequence.hand_over


class LateBlocks(NamedTuple):
    block_ids: SequenceOf[int]
    is_spent: bool  # as `BlockPool.release` means it


class AsyncScheduling:
    """Steps that were planned ahead: at most one beyond the step that is applied next.

    late_blocks: blocks that were freed while such a step may write to them. No sequence may get
        them before the step has ended.
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
        reaching: list[Sequence],
        step_budget: StepBudget,
        needs_host: Callable[[Sequence], bool],
    ) -> tuple[StepPlan | None, list[Sequence], int]:
        """Plan the step after `plan` before `plan` is applied.

        Returns None if `plan` must be applied first. Otherwise the step, the sequences that need a
        block for it, and the tokens that are left of its budget. It admits no sequence.

        Args:
            reaching: as for `ProjectedPlan`.
            needs_host: whether a sequence that runs but is not part of `plan` needs the host.
        """
        if self._near_budget and not self._near_budget.isdisjoint(plan.sequences):
            return None, [], 0
        running = queues.running
        is_whole = len(plan.sequences) == len(running) and not self._gone
        if is_whole and all_go_on(plan, reaching):
            num_left = step_budget.most - plan.num_decodes
            return continued(plan), growing_next(reaching), num_left
        after = ProjectedPlan(plan, queues.by_id if self._gone else None, reaching)
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
        budget = step_budget.of_prompts(after.decodes, after.num_context, num_before)
        chunks = Chunks(self._pool, budget, running, after.num_context)
        for sequence, start in prefills:
            chunks.add(sequence, start)
        return chunks.step_plan(after.decodes, after.starts), after.growing, chunks.budget

    def begin(self) -> None:
        """A step is planned ahead."""
        self._num_planned += 1

    def watch_thinking(self, sequence: Sequence) -> None:
        """Check the reasoning budget of a sequence, once a block (see `Sequence`).

        Until the next check it gains a block's tokens, and the step ahead samples one more.
        """
        sequence.watch_thinking(self._pool.block_size + 2)
        (self._near_budget.add if sequence.needs_host else self._near_budget.discard)(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended; a running step may still have a row of it."""
        self._near_budget.discard(sequence)
        if self.is_under_way:
            self._gone.add(sequence)

    def release(self, block_ids: SequenceOf[int], *, is_spent: bool = False) -> None:
        """As `BlockPool.release`, but not before the last running step that may write to them."""
        if not self.is_under_way:
            self._pool.release(block_ids, is_spent=is_spent)
        elif block_ids:
            self.late_blocks.append(LateBlocks(block_ids, is_spent))

    def end(self) -> set[Sequence]:
        """The oldest planned step has ended on the device. Frees the blocks that only it wrote to.

        Returns the sequences that ended after it was planned.
        """
        self._num_planned -= 1
        late, self.late_blocks = self.late_blocks, []
        for block_ids, is_spent in late:
            self._pool.release(block_ids, is_spent=is_spent)
        gone, self._gone = self._gone, set()
        return gone
