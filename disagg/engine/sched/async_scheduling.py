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

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import compress
from operator import attrgetter, is_
from typing import NamedTuple

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan


class ProjectedPlan:
    """The state of a plan's sequences after it is applied, if none of them ends early.

    by_id: those that have not ended while the plan was under way; None: none of its own has.
    decodes, starts: those with one token to compute, which the plan samples, and its position.
    growing: those of them that need a block for it.
    prefills: those in the middle of a prompt, with the position where they go on.
    num_here: sequences of the plan that are still here; some will have ended.
    num_context: tokens of the decodes.
    """

    __slots__ = ("decodes", "growing", "num_context", "num_here", "prefills", "starts")

    def __init__(self, plan: StepPlan, by_id: Mapping[str, Sequence] | None) -> None:
        is_here = [True] * len(plan.sequences)
        if by_id is not None:
            found = map(by_id.get, map(attrgetter("request_id"), plan.sequences))
            is_here = [*map(is_, found, plan.sequences)]
        self.num_here = sum(is_here)
        self._continue_decodes([*compress(plan.sequences[: plan.num_decodes], is_here)])
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

    def _continue_decodes(self, decodes: list[Sequence]) -> None:
        looked_at = [
            each for each in decodes if len(each.tokens) + 1 >= each.check_at or each.hand_over
        ]
        if ending := set(filter(_ends_next, looked_at)):
            decodes = [each for each in decodes if each not in ending]
        self.decodes = decodes
        self.starts = [each.num_computed + 1 for each in decodes]
        self.growing = [
            each
            for each in looked_at
            if each.num_computed + 1 == each.num_slots and each not in ending
        ]


def _ends_next(sequence: Sequence) -> bool:
    """Whether it ends or leaves with its next token, whatever that is."""
    return len(sequence.tokens) + 1 >= sequence.max_num_tokens or sequence.hand_over


class LateBlocks(NamedTuple):
    block_ids: SequenceOf[int]
    is_spent: bool  # as `BlockPool.release` means it


class AsyncScheduling:
    """Steps that were planned ahead: at most one behind the one that will be applied next.

    late_blocks: given up while such a step may write to them; nobody else may have them before it
        has ended.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.late_blocks: list[LateBlocks] = []
        self._pool = pool
        self._num_planned = 0
        self._gone: set[Sequence] = set()

    @property
    def has_ended_rows(self) -> bool:
        """Somebody has ended since the step under way was planned."""
        return bool(self._gone)

    @property
    def is_under_way(self) -> bool:
        return self._num_planned > 0

    def begin(self) -> None:
        """A step is planned ahead."""
        self._num_planned += 1

    def forget(self, sequence: Sequence) -> None:
        """It has ended, and a step under way may have a row of it."""
        if self.is_under_way:
            self._gone.add(sequence)

    def release(self, block_ids: SequenceOf[int], *, is_spent: bool = False) -> None:
        """As `BlockPool.release`: now, or when no step under way writes to them any more."""
        if not self.is_under_way:
            self._pool.release(block_ids, is_spent=is_spent)
        elif block_ids:
            self.late_blocks.append(LateBlocks(block_ids, is_spent))

    def end(self) -> set[Sequence]:
        """The first of them has ended on the device. What it wrote to for nothing is free.

        Returns those who ended after it was planned.
        """
        self._num_planned -= 1
        late, self.late_blocks = self.late_blocks, []
        for block_ids, is_spent in late:
            self._pool.release(block_ids, is_spent=is_spent)
        gone, self._gone = self._gone, set()
        return gone
