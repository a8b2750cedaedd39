"""Fills a step's token budget with chunks of prompts and with drafts to verify.

Decides how many tokens each sequence gets, in the order in which they are added.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import lacks_row, make_room, place_state
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import MAX_AHEAD, claim
from disagg.engine.sched.step import StepPlan
from disagg.time_model import StepFeatures


class Chunks:
    """Collects the work of one step until its token budget is used up.

    Args:
        budget: tokens that the step may compute.
        running: sequences for each of which drafts and chunks must leave a free row.
        num_context: tokens of the sequences that decode in the step.
        has_prompts: whether a prompt waits, for which drafts leave half of the budget.
    """

    __slots__ = (
        "_most_ahead",
        "_num_ahead",
        "_num_context",
        "_pool",
        "_running",
        "_sizes",
        "budget",
    )

    def __init__(
        self,
        pool: BlockPool,
        budget: int,
        running: SequenceOf[Sequence],
        num_context: int,
        *,
        has_prompts: bool = False,
    ) -> None:
        self.budget = budget
        self._most_ahead = min(MAX_AHEAD, budget // 2) if has_prompts else MAX_AHEAD
        self._num_context = num_context
        self._pool = pool
        self._running = running
        self._num_ahead = 0
        self._sizes: list[tuple[Sequence, int, int]] = []

    def add(self, sequence: Sequence, start: int) -> None:
        """Add a sequence's next tokens from `start` on, and its draft if these are the last."""
        num_left = len(sequence.tokens) - start
        num_tokens = min(self.budget, num_left)
        if self._pool.groups.num_states:
            num_tokens = self._end(sequence, start, start + num_tokens) - start
        if start + num_tokens > sequence.num_slots:
            own = self._pool.groups.num_groups  # that are kept free for this one
            make_room(self._pool, sequence, start + num_tokens, self._num_spare_blocks + own)
            num_tokens = min(num_tokens, sequence.num_slots - start)
        if num_tokens and not place_state(self._pool, sequence, start + num_tokens):
            assert not lacks_row(self._pool, sequence), "the row of the first token has a state"
            size = self._pool.block_size
            num_tokens = min(num_tokens, size - start % size)
        if num_tokens == num_left and sequence.draft:
            limit = min(self.budget - num_left, self._most_ahead - self._num_ahead)
            num_ahead = claim(self._pool, sequence, limit, self._num_spare_blocks)
            self._num_ahead += num_ahead
            num_tokens += num_ahead
        if num_tokens:
            self._sizes.append((sequence, start, num_tokens))
            self.budget -= num_tokens

    def _end(self, sequence: Sequence, start: int, end: int) -> int:
        """Where a chunk ends of a sequence with a recurrent state.

        The state is saved at the end of the prompt's last whole row that another prompt like it may
        use, and at the ends of other chunks. So these lie at ends of rows.
        """
        size, num_prompt = self._pool.block_size, sequence.num_prompt_tokens
        if not self._pool.enable_prefix_caching or start >= num_prompt:
            return end
        saved = min(end, num_prompt - 1) // size * size
        return saved if start < saved else end

    @property
    def _num_spare_blocks(self) -> int:
        return self._pool.num_free - len(self._running) * self._pool.groups.num_groups

    def add_drafted(self, decodes: list[Sequence]) -> list[Sequence]:
        """Add the sequences of `decodes` that have a draft. Returns the other sequences."""
        others = [sequence for sequence in decodes if not sequence.draft]
        for sequence in [sequence for sequence in decodes if sequence.draft]:
            self._num_context -= len(sequence.tokens)
            self.budget += 1  # one token of each decode was already subtracted
            self.add(sequence, sequence.num_computed)
        return others

    def step_plan(self, decodes: list[Sequence], starts: list[int] | None = None) -> StepPlan:
        """The plan: `decodes`, with one token each, then the sequences that were added.

        For the time model, a token of a draft is one more sequence that decodes, and no prompt
        token: it takes about as long.

        Args:
            starts: positions of the decodes, for a step that is planned ahead; their tokens are
                not read yet.
        """
        num_unread = 0 if starts is None else len(decodes)
        sequences: list[Sequence] = []
        sizes: list[int] = []
        chunk_starts: list[int] = []
        num_prompt_tokens = num_attended = num_drafting = 0
        num_context = self._num_context
        for sequence, num_before, num_tokens in self._sizes:
            decodes_here = len(sequence.tokens) - num_before == 1
            if decodes_here:
                num_context += num_before + 1
            if decodes_here and num_tokens == 1:
                decodes.append(sequence)
                if starts is not None:
                    starts.append(num_before)
                continue
            sequences.append(sequence)
            sizes.append(num_tokens)
            chunk_starts.append(num_before)
            if decodes_here:
                num_drafting += num_tokens
            else:
                num_prompt_tokens += num_tokens
                num_attended += num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
        num_decodes = len(decodes)
        features = StepFeatures(
            num_prompt_tokens, num_attended, num_decodes + num_drafting, num_context
        )
        return StepPlan(
            decodes + sequences,
            [1] * num_decodes + sizes,
            num_decodes,
            features,
            self._num_ahead,
            () if starts is None else starts + chunk_starts,
            num_unread,
        )
