"""The step after the one that runs, planned before anybody knows what that one samples.

A device that computes by itself would stand idle while Python applies a step and plans the next. As
long as the same sequences only go on decoding, the next plan needs none of the tokens that are
still to come: it follows here from the plan that runs, is launched behind it, and takes its tokens
from it on the device. Whatever could make it another plan (somebody may enter, leave by order or
have to give way, a prompt is half computed, a draft is there) means: apply the step first.

What a sequence learns only then, that it has ended, costs the row that it has in the later step:
its result is ignored, and blocks that the row writes to are given back when that step has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from disagg.engine.block_pool import BlockPool
from disagg.engine.ownership import grow
from disagg.engine.sequence import Sequence
from disagg.engine.step import StepPlan
from disagg.time_model import StepFeatures


class LateBlocks(NamedTuple):
    block_ids: SequenceOf[int]
    is_spent: bool  # as `BlockPool.release` means it


class Following:
    """Steps that were planned ahead: at most one behind the one that will be applied next.

    late_blocks: given up while such a step may write to them; nobody else may have them before it
        has ended.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.late_blocks: list[LateBlocks] = []
        self._pool = pool
        self._num_planned = 0

    @property
    def is_under_way(self) -> bool:
        return self._num_planned > 0

    def plan(
        self, plan: StepPlan, by_id: Mapping[str, Sequence], num_running: int
    ) -> StepPlan | None:
        """The step after `plan`, which has not been applied. None: it cannot be known yet.

        Takes the blocks that it needs, if all of them are there.

        Args:
            by_id: the sequences that are still here.
            num_running: how many of them run.
        """
        sequences: list[Sequence] = []
        rows: list[int] = []
        growing: list[Sequence] = []
        num_here = num_context = 0
        for row, sequence in enumerate(plan.sequences):
            if by_id.get(sequence.request_id) is not sequence:
                continue  # it ended while this step was under way
            num_here += 1
            num_tokens = len(sequence.tokens) + 1  # with the one that `plan` samples
            if sequence.num_uncomputed != 1 or sequence.hand_over or sequence.draft:
                return None
            if num_tokens >= sequence.max_num_tokens:
                continue  # that one is its last
            if num_tokens > sequence.num_slots:
                growing.append(sequence)
            sequences.append(sequence)
            rows.append(row)
            num_context += num_tokens
        num_decodes = len(sequences)
        if not num_decodes or num_here < num_running or not grow(self._pool, growing):
            return None
        self._num_planned += 1
        features = StepFeatures(0, 0, num_decodes, num_context)
        return StepPlan(sequences, [1] * num_decodes, num_decodes, num_decodes, features, 0, rows)

    def release(self, block_ids: SequenceOf[int], *, is_spent: bool = False) -> None:
        """As `BlockPool.release`: now, or when no step under way writes to them any more."""
        if not self.is_under_way:
            self._pool.release(block_ids, is_spent=is_spent)
        elif block_ids:
            self.late_blocks.append(LateBlocks(block_ids, is_spent))

    def end(self) -> None:
        """The first of them has ended on the device. What it wrote to for nothing is free."""
        self._num_planned -= 1
        late, self.late_blocks = self.late_blocks, []
        for block_ids, is_spent in late:
            self._pool.release(block_ids, is_spent=is_spent)
