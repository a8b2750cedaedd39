"""The scheduler: continuous batching with chunked prefill, prefix caching and preemption.

`plan` decides which sequences compute how many tokens in the next step; a runner executes the plan;
`apply` is the only place where a sequence advances. Decodes go first, and the rest of the token
budget goes to chunks of prompts, oldest first. Must not know devices, workers, transfers or a
clock.

"Older" means more urgent (a lower `priority`), or equally urgent and earlier. "Later" is the
opposite.

There are two queues: `waiting` sequences own no blocks; `imported` sequences own blocks with
imported KV. Imported sequences are admitted even while an older waiting sequence is short of
blocks, because the blocks that they hold become free only when they have run. Preemption takes the
latest sequence and recomputes it later: its `num_computed` becomes 0, as in a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from disagg.engine.sched.async_scheduling import AsyncScheduling
from disagg.engine.sched.block_pool import BlockPool, require
from disagg.engine.sched.block_tables import (
    begin_row,
    disown,
    give_back,
    grow,
    held_blocks,
    keep_last_state,
    lacks_row,
    num_slots,
    publish,
    take_imported,
)
from disagg.engine.sched.chunks import Chunks
from disagg.engine.sched.drafting import Drafting, Proposer
from disagg.engine.sched.engine_admission import EngineAdmission
from disagg.engine.sched.queues import Queues
from disagg.engine.sched.sequence import Sequence, check_token_ids, token_limit
from disagg.engine.sched.speculation import gain, usable
from disagg.engine.sched.step import Sampled, SampledToken, StepPlan, TokenEvent
from disagg.engine.sched.step_budget import StepBudget
from disagg.errors import DisaggError, InvalidLogits, StartupError
from disagg.messages import TokenLogprobs

# A sequence with a draft sits out every other step that is planned ahead. If more than this share
# have drafts, their lost rows cost more than the 3 % of a step that the device would wait for the
# host instead (an estimate: 0.5 ms of 18 ms, for 256 sequences of an 8B model).
MOST_DRAFTS_AHEAD = 1 / 32

_DRAFT = attrgetter("draft")


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        pool: the KV blocks; KV import and KV export hold blocks of it too.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: most tokens of one sequence, prompt and output.
        vocab_size: token ids from here on are refused, since they would fail on a device.
        proposer: proposes drafts for decoding sequences, beside those that grammars force.

    Raises:
        StartupError: the token budget is smaller than the number of sequences.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int = 1 << 31,
        proposer: Proposer | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, but {max_num_seqs} sequences"
                " may decode in one step; raise it, or lower max_num_seqs.",
                param="max_num_batched_tokens",
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.step_budget = StepBudget(max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.drafting = Drafting(self.step_budget, vocab_size, proposer)
        self.queues = queues = Queues()
        self.running, self.imported, self.waiting = queues.running, queues.imported, queues.waiting
        self.num_preempted = 0  # preemptions since the start
        self.num_corrupted = 0  # sequences that ended with `InvalidLogits` since the start
        self.num_drafted = 0  # draft tokens that were verified since the start
        self.num_accepted = 0  # draft tokens that were right since the start
        self.most_drafts_ahead = MOST_DRAFTS_AHEAD
        self._async_scheduling = AsyncScheduling(pool)
        self._admission = EngineAdmission(pool, queues, max_num_seqs)

    # Entering and leaving.

    def number(self, sequence: Sequence) -> None:
        """Give a sequence its place in the queue, before it is ready to be submitted or joined."""
        self.queues.number(sequence)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that owns no blocks.

        Raises:
            RequestError: the sequence can never fit, or is inconsistent.
        """
        if sequence.block_ids or sequence.num_computed:
            raise ValueError(f"{sequence} owns blocks; call `join` instead of `submit`")
        self._accept(sequence)
        self._admission.enqueue(sequence)

    def join(self, sequence: Sequence) -> None:
        """Queue a sequence whose first `num_computed` tokens have their KV in its `block_ids`.

        Its full blocks are cached at once, since other sequences may share the prefix.

        Raises:
            RequestError: as `submit`; the blocks stay the caller's.
        """
        num = num_slots(self.pool, sequence)
        if not 0 < sequence.num_computed <= min(num, len(sequence.tokens) - 1):
            raise ValueError(f"{sequence} cannot join with blocks of {num} KV slots")
        self._accept(sequence)
        take_imported(self.pool, sequence)
        self.queues.put(sequence, self.imported)

    def reserve(self, num_blocks: int, arrival: tuple[int, int] | None = None) -> list[int] | None:
        """Allocate blocks for imported KV. Returns None if running or older sequences need them.

        Args:
            arrival: the place that `number` gave; None counts as the latest.
        """
        if not self._admission.may_reserve(num_blocks, arrival):
            return None
        return self.pool.allocate(num_blocks)

    def remove(self, request_id: str) -> Sequence | None:
        """Remove a sequence in any state, and release its blocks. None if it is unknown."""
        sequence = self.queues.by_id.get(request_id)
        if sequence is not None:
            self._forget(sequence)
            keep_last_state(self.pool, sequence)  # its client may have found a stop string
            self.release(disown(sequence))
        return sequence

    def hand_over(self, sequence: Sequence) -> None:
        """Make a running or imported sequence leave with its next token."""
        sequence.hand_over = True

    def release(self, block_ids: SequenceOf[int], *, is_spent: bool = False) -> None:
        """As `BlockPool.release`, but after the last running step that may write to the blocks."""
        self._async_scheduling.release(block_ids, is_spent=is_spent)

    def abandon(self) -> list[Sequence]:
        """Remove all sequences without releasing their blocks. Only for a broken engine."""
        self._admission.short = None
        return self.queues.clear()

    def check(self) -> None:
        """Recount the queues. Raises an `AssertionError` that names the first difference."""
        require(len(self.running) <= self.max_num_seqs, "too many sequences run")
        self.queues.check(self.pool.groups)

    def __contains__(self, sequence: Sequence) -> bool:
        return self.queues.by_id.get(sequence.request_id) is sequence

    def sequences(self) -> list[Sequence]:
        return list(self.queues.by_id.values())

    def holders(self) -> list[SequenceOf[int]]:
        """The blocks of each sequence."""
        late = [each.block_ids for each in self._async_scheduling.late_blocks]
        return [*(held_blocks(each.block_ids) for each in self.sequences()), *late]

    @property
    def max_num_batched_tokens(self) -> int:
        return self.step_budget.most

    @property
    def has_work(self) -> bool:
        return bool(self.queues.by_id)

    @property
    def is_short(self) -> bool:
        """Whether a waiting sequence found too few blocks in the last plan."""
        return self._admission.short is not None

    # Deciding.

    def plan(self) -> StepPlan:
        """Plan the next step. Allocates and frees blocks, but advances no sequence.

        `num_computed` follows the blocks: a prefix hit raises it, and preemption sets it to 0.
        """
        pool = self.pool
        if not pool.groups.num_states:  # what a wrong draft does to a state cannot be undone
            self.drafting.propose(self.running, self.queues.num_computed)
        decodes, prefills, num_preempted = *self.queues.split_running(), self.num_preempted
        growing = [each for each in decodes if len(each.tokens) > each.num_slots]
        if pool.groups.num_states:
            growing = [each for each in decodes if lacks_row(pool, each)]
        if growing and not grow(pool, growing):
            self._grow_by_turns(growing)
        if pool.groups.num_partial:  # every prompt goes on
            self._grow_by_turns([each for each in prefills if lacks_row(pool, each)])
        if num_preempted != self.num_preempted:
            decodes = [sequence for sequence in decodes if sequence.block_ids]
            prefills = [sequence for sequence in prefills if sequence.block_ids]
        if num_preempted == self.num_preempted:
            decodes += self._admission.join_decodes()
        num_context = self.queues.num_computed + len(decodes)
        num_context -= sum(sequence.num_computed for sequence in prefills)
        first = next(iter(prefills or self.imported or self.waiting), None)
        num_before = None if first is None else first.num_computed
        budget = self.step_budget.of_prompts(decodes, num_context, num_before)
        has_prompts = first is not None
        chunks = Chunks(self.pool, budget, self.running, num_context, has_prompts=has_prompts)
        decodes = chunks.add_drafted(decodes)
        if num_preempted == self.num_preempted:
            prefills += self._admit(chunks.budget, prefills)
        for sequence in prefills:
            chunks.add(sequence, sequence.num_computed)
        return chunks.step_plan(decodes)

    def plan_following(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan` before `plan` is applied.

        None if `plan` must be applied first. So it always must with recurrent states: the step
        after it would advance that of a sequence which turns out to have left.
        """
        if self.pool.groups.num_states:
            return None
        drafting, running = self.drafting, self.running
        waiting = drafting.propose(running, self.queues.num_computed, plan.sequences)
        num_drafts = len(waiting) + sum(map(bool, map(_DRAFT, running)))
        if num_drafts > len(running) * self.most_drafts_ahead:
            return None
        resting = [each for each in waiting if drafting.is_worth_a_step(each)]
        following, growing, num_left = self._async_scheduling.follow(
            plan, self.queues, self.step_budget, resting
        )
        if following is None or self._admission.may_admit(num_left):
            return None
        if not grow(self.pool, growing):
            return None
        self._async_scheduling.begin()
        return following

    def drop_following(self) -> None:
        """Forget the plan of `plan_following`, of which the device has ended what was launched.

        Call it when the step before is applied.
        """
        self._async_scheduling.end()

    def _admit(self, budget: int, prefills: list[Sequence]) -> list[Sequence]:
        """Admit prompts in a step that goes on with `prefills`; `budget` tokens are for both."""
        budget -= sum(sequence.num_uncomputed for sequence in prefills)
        admitted = self._admission.admit(budget)
        if not self.running and self.imported and len(self.imported) + len(self.waiting) > 1:
            self._preempt_latest()  # imported sequences hold all blocks, and none can run
        self._admission.end()
        return admitted

    def _grow_by_turns(self, sequences: list[Sequence]) -> None:
        """Allocate one more row for each sequence, oldest first.

        If there are too few blocks, it preempts the latest sequences, which may be some of these.
        """
        for sequence in sequences:
            while sequence.block_ids and not begin_row(self.pool, sequence):
                self._preempt_latest()

    def begin_again(self) -> None:
        """Preempt what runs, after a step that failed: it may have advanced recurrent states."""
        while self.running:
            self._preempt_latest()

    def _preempt_latest(self) -> Sequence:
        """Preempt the latest sequence that owns blocks: free them, and move it to `waiting`."""
        victim = self.queues.pop_latest()
        self.num_preempted += 1
        victim.draft = ()  # with a draft the sequence would need more room than before
        give_back(self.pool, victim)
        self.queues.put(victim, self.waiting)
        self._admission.put_back(victim)
        return victim

    # Advancing.

    def apply(self, plan: StepPlan, sampled: SequenceOf[Sampled]) -> list[TokenEvent]:
        """Advance every sequence of the plan by the computed and sampled tokens.

        Sequences that have ended since the plan was made are skipped.
        """
        gone = self._async_scheduling.end() if plan.is_ahead else ()
        events: list[TokenEvent] = []
        num_computed = num_gained = 0
        token_ids: tuple[int, ...]
        logprobs: tuple[TokenLogprobs, ...] | None
        for sequence, num_tokens, result in zip(
            plan.sequences, plan.query_lens, sampled, strict=True
        ):
            if sequence in gone:
                continue
            if isinstance(result, int):
                token_ids, logprobs = (result,), None
            elif result is None:
                token_ids, logprobs = (), None
            elif isinstance(result, SampledToken):
                token_ids = (result.token_id,)
                logprobs = None if result.logprobs is None else (result.logprobs,)
            elif isinstance(result, tuple):
                events.append(self._verified(sequence, result))
                continue
            else:
                events.append(self._failed(sequence, result))
                continue
            num_computed += num_tokens
            sequence.num_computed = end = sequence.num_computed + num_tokens
            sequence.tokens += token_ids
            if end >= sequence.publish_at:
                publish(self.pool, sequence)
            if not token_ids:
                continue
            num_gained += 1
            if sequence.draft:  # the step was launched before the draft was proposed
                sequence.draft = sequence.draft[1:] if sequence.draft[:1] == token_ids else ()
            may_end = end + 1 >= sequence.max_num_tokens or token_ids[0] in sequence.stop_ids
            if may_end or sequence.hand_over or sequence.thinking is not None:
                events.append(self._gained(sequence, token_ids, logprobs))
            else:  # nearly always, so two calls are saved
                events.append(TokenEvent(sequence, token_ids, logprobs))
        self.queues.advance(num_computed, num_gained)
        return events

    def _verified(self, sequence: Sequence, verified: tuple[SampledToken, ...]) -> TokenEvent:
        """Advance a sequence by the tokens of its draft that are right, and one token more."""
        num_before = sequence.num_computed
        token_ids, logprobs = gain(self.pool, sequence, verified)
        self.num_drafted += len(verified) - 1
        self.num_accepted += len(token_ids) - 1
        self.drafting.learn(sequence, len(verified) - 1, len(token_ids) - 1)
        self.queues.advance(sequence.num_computed - num_before, len(token_ids))
        return self._gained(sequence, token_ids, logprobs)

    def _failed(self, sequence: Sequence, error: DisaggError) -> TokenEvent:
        """End a sequence that got an error instead of a token."""
        if isinstance(error, InvalidLogits):
            self.num_corrupted += 1
            # Another request with its KV might fail too, or with what it has left behind.
            self.pool.forget(self.pool.groups.every_name(sequence.block_hashes))
        self.remove(sequence.request_id)
        return TokenEvent(sequence, error=error)

    def _gained(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> TokenEvent:
        """The event of a sequence that has gained tokens, and may end or be handed over now."""
        reason = sequence.finish_reason()
        if reason is None and not sequence.hand_over:
            if sequence.thinking is not None:
                sequence.watch_thinking()
            return TokenEvent(sequence, token_ids, logprobs)
        self._forget(sequence)
        if reason is not None:
            keep_last_state(self.pool, sequence)
            self.release(disown(sequence))
        return TokenEvent(sequence, token_ids, logprobs, reason, left=reason is None)

    # Bookkeeping.

    def _accept(self, sequence: Sequence) -> None:
        self.queues.check_new(sequence)
        check_token_ids(sequence.sampling, self.vocab_size)
        sequence.max_num_tokens = token_limit(
            sequence,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            num_blocks=self.pool.num_blocks,
            groups=self.pool.groups,
        )
        if sequence.draft:
            draft = () if self.pool.groups.num_states else sequence.draft
            sequence.draft = usable(sequence, draft, self.vocab_size)
        self.number(sequence)
        self.queues.by_id[sequence.request_id] = sequence
        sequence.watch_thinking()

    def _forget(self, sequence: Sequence) -> None:
        self.queues.forget(sequence)
        self._async_scheduling.forget(sequence)
        self._admission.forget(sequence)
