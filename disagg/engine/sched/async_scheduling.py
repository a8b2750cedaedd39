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
    growing: the sequences of `decodes` that need a new block for that token.
    prefills: sequences in the middle of a prompt, with the position where they continue.
    num_here: number of the plan's sequences that are still here, including those that will have
        ended.
    num_context: number of tokens of the decodes.
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
            by_id: the sequences that have not ended while the plan ran; None: none has ended.
            reaching: the sequences that reach a milestone with the plan if they decode in it.
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
    """Whether all sequences of a plan decode in this step and in the next.

    The caller knows that none of them has ended.

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
    """The sequences that need a new block for the token after the next. Args: see `all_go_on`."""
    return [
        each
        for each in reaching
        if each.num_computed + 1 == each.num_slots and not _ends_next(each)
    ]


def _ends_next(sequence: Sequence) -> bool:
    """Whether a sequence ends or is handed over with its next token, whichever token that is."""
    return len(sequence.tokens) + 1 >= sequence.max_num_tokens or sequence.hand_over


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
        reaching: list[Sequence],
        step_budget: StepBudget,
        needs_host: Callable[[Sequence], bool],
    ) -> tuple[StepPlan | None, list[Sequence], int]:
        """Plan the step after `plan` before `plan` is applied.

        The step admits no sequence. Returns the step (None if `plan` must be applied first), the
        sequences that need a block for it, and the number of tokens that are left of its budget.

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
