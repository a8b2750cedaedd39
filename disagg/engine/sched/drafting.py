"""Decides which sequences get a draft, of which kind, and how long.

There are four kinds. The tokens that a grammar forces are always proposed: they are certain, so a
JSON answer's names and punctuation cost few steps. A `Proposer` is asked for by the configuration:
prompt lookup, or a smaller model. The answer of a cascade's smaller model comes with its request.
`speculation` verifies all of them in the same way.

A draft is as long as the time model says that it pays. It compares the tokens that a draft will
probably gain, by how far the sequence's last drafts were right, with the seconds that its tokens
add to the step. Where that is less than the step gains without, there is no draft, but for
`trials`. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Protocol

from disagg.engine.sched.acceptance import Acceptance
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import usable
from disagg.engine.sched.step_budget import StepBudget
from disagg.engine.sched.trials import Trials

MAX_FORCED = 15  # tokens; with the one before them they are a tile of attention

NUM_CALM = 15  # steps after which it is computed again whether drafts pay


class Proposer(Protocol):
    """Proposes drafts for sequences that decode.

    num_tokens: most tokens of a draft.
    knows_ahead: whether it may propose before the sequence's last token is known.
    spent_s: seconds that were spent in `propose`, since the start.
    """

    num_tokens: int
    knows_ahead: bool
    spent_s: float

    def token_s(self, num_sequences: int, place: int) -> float:
        """Seconds that proposing the token at a place of a draft takes for so many sequences
        together; for the first one with all that is done once."""
        ...

    def entry_s(self, sequence: Sequence) -> float:
        """Seconds that it takes before the first draft of a sequence, to compute its prompt."""
        ...

    def propose(self, limits: Mapping[Sequence, int]) -> Iterable[tuple[Sequence, tuple[int, ...]]]:
        """Drafts of at most so many tokens for these sequences, or for some of them.

        If it is called with no sequence a few times in a row, which is not in each step, the
        proposer may rest, and may need some more steps before it proposes again.
        """
        ...


class Drafting:
    """Gives sequences their drafts.

    Args:
        step_budget: knows the time model, without which every draft has full length.
        vocab_size: the model has no tokens from here on; a smaller model may have.
        proposer: None: only what grammars force is proposed.

    Attributes:
        num_accepted_at: for each position, how many drafts were right up to there.
    """

    def __init__(
        self, step_budget: StepBudget, vocab_size: int, proposer: Proposer | None = None
    ) -> None:
        self.proposer = proposer
        self.num_drafts = 0
        self.num_accepted_at: list[int] = []
        self._step_budget = step_budget
        self._vocab_size = vocab_size
        self._spent_s = 0.0
        self._of_all = Acceptance()
        self._num_calm = 0
        self._trials = Trials()

    def propose(
        self,
        running: SequenceOf[Sequence],
        num_context: int,
        under_way: SequenceOf[Sequence] = (),
    ) -> list[Sequence]:
        """Give drafts to the running sequences that decode and have none.

        Args:
            num_context: computed tokens of all running sequences.
            under_way: the sequences of a step that is not read yet. They may have one token more,
                so a draft of one token would be of no use; nor would it to others, which take part
                in every other step, too.

        Returns:
            Those under way for which a draft pays that cannot be made before the step is read.
        """
        proposer, is_calm = self.proposer, self._num_calm > 0
        self._num_calm -= is_calm
        if is_calm and self._trials.sequence is None:  # looking costs time, too
            proposer = None
        if proposer is None:  # one answer with a grammar costs the others nothing
            running = [each for each in running if each.grammar_state is not None]
            if not running:
                return []
        unread, others, least = set(under_way), [], 2 if under_way else 1
        for sequence in running:
            is_decoding = len(sequence.tokens) - sequence.num_computed == 1
            # A sequence that is handed over leaves with its next token, so a draft is useless.
            if not is_decoding or sequence.hand_over or sequence.draft:
                continue
            if forced := _forced(sequence, self._vocab_size):
                if len(forced) >= least:
                    sequence.draft = forced
            elif sequence.takes_drafts:
                others.append(sequence)
        if proposer is None or not others:
            return []
        limits = {} if is_calm else self._limits(proposer, others, len(running), num_context)
        trial = None if limits else self._trials.sequence
        if trial is not None:
            self._trials.step()
            limits = {trial: proposer.num_tokens} if trial in others else {}
        waiting = [] if proposer.knows_ahead else [each for each in limits if each in unread]
        for sequence in waiting:
            del limits[sequence]
        spent_s = proposer.spent_s
        for sequence, draft in proposer.propose(limits):
            draft = usable(sequence, draft, self._vocab_size)
            if sequence.grammar_state is not None:
                draft = draft[: sequence.grammar_state.num_allowed(sequence.tokens, draft)]
            if len(draft) >= least:
                sequence.draft = draft
                if sequence.acceptance is not None:
                    sequence.acceptance.is_asked = True
                if sequence is trial:
                    self._trials.sequence = None
        if trial is not None:
            self._trials.cost_s += proposer.spent_s - spent_s
        if unread:  # meanwhile the device computed the model's step
            self._spent_s += proposer.spent_s - spent_s
        return waiting

    def is_worth_a_step(self, sequence: Sequence) -> bool:
        """Whether a draft gains more than the token of a step in which it is made."""
        acceptance, proposer = sequence.acceptance, self.proposer
        if acceptance is None or proposer is None or sequence is self._trials.sequence:
            return True
        num_gained: float = sum(acceptance.chances[: proposer.num_tokens])
        return num_gained > 1.0

    def take_spent_s(self) -> float:
        """Seconds since the last call in which drafts were made while the model had no step."""
        before, self._spent_s = self._spent_s, self.proposer.spent_s if self.proposer else 0.0
        return self._spent_s - before

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record how far a draft was right."""
        self.num_drafts += 1
        missing = num_accepted - len(self.num_accepted_at)
        self.num_accepted_at += [0] * missing
        for i in range(num_accepted):
            self.num_accepted_at[i] += 1
        acceptance = sequence.acceptance
        if acceptance is not None and acceptance.is_asked:
            acceptance.learn(num_drafted, num_accepted)
            self._of_all.learn(num_drafted, num_accepted)

    def _limits(
        self, proposer: Proposer, sequences: list[Sequence], num_decodes: int, num_context: int
    ) -> dict[Sequence, int]:
        """How many tokens to propose for each sequence; only those for which some pay."""
        if self._step_budget.times is None:
            return dict.fromkeys(sequences, proposer.num_tokens)
        times = self._step_budget.times()
        gained, step_s = float(num_decodes), times.decode_step_s(num_decodes, num_context)
        for each in sequences:
            if each.acceptance is None:
                each.acceptance = Acceptance(self._of_all)
        num = len(sequences)
        costs_s = [
            times.per_sequence_s + proposer.token_s(num, place) / num
            for place in range(proposer.num_tokens)
        ]
        drafted = [
            (each, each.acceptance.chances)
            for each in sequences
            if each.acceptance and _is_worth_its_entry(proposer, each, step_s / gained, costs_s)
        ]
        limits: dict[Sequence, int] = {}
        best, length = gained / step_s, 0
        for place in range(proposer.num_tokens):
            least = times.per_sequence_s * best
            drafted = [each for each in drafted if each[1][place] > least]
            if not drafted:
                break
            gained += sum([chances[place] for _, chances in drafted])
            step_s += len(drafted) * times.per_sequence_s + proposer.token_s(len(drafted), place)
            limits.update((sequence, place + 1) for sequence, _ in drafted)
            if gained / step_s > best:
                best, length = gained / step_s, place + 1
        limits = {each: min(limit, length) for each, limit in limits.items()} if length else {}
        if not limits:
            self._num_calm = NUM_CALM
            step_s = times.decode_step_s(num_decodes, num_context)
            draft_s = step_s / num_decodes + proposer.num_tokens * times.per_sequence_s
            self._trials.begin(sequences, (NUM_CALM + 1) * step_s, draft_s)
            return {}
        for each in sequences:
            if each.acceptance is not None and each not in limits:
                each.acceptance.rest()
        return limits


def _is_worth_its_entry(
    proposer: Proposer, sequence: Sequence, gained_s: float, costs_s: SequenceOf[float]
) -> bool:
    """Whether drafts probably gain more than the first one costs before it is made.

    Nobody knows how long an answer will be. It is believed to go on for as long as it has lasted.

    Args:
        gained_s: what a token that is right is worth.
        costs_s: what it takes to make and verify one at each place of a draft.
    """
    entry_s, acceptance = proposer.entry_s(sequence), sequence.acceptance
    if not entry_s or acceptance is None:
        return True
    num_tokens = len(sequence.tokens)
    num_steps = min(num_tokens - sequence.num_prompt_tokens, sequence.max_num_tokens - num_tokens)
    chances = acceptance.chances[: len(costs_s)]
    gains = [chance * gained_s - cost_s for chance, cost_s in zip(chances, costs_s, strict=True)]
    most_s: float = max(accumulate(gains))
    return num_steps * most_s > entry_s


def _forced(sequence: Sequence, vocab_size: int) -> tuple[int, ...]:
    """The next tokens that the sequence's grammar forces."""
    state, thinking = sequence.grammar_state, sequence.thinking
    if state is None or sequence.sampling.has_penalties:
        return ()
    if thinking is not None:
        allowed = thinking.allowed(sequence.tokens, has_grammar=True)
        if allowed.grammar_at is None or allowed.also:
            return ()
        state.begin_at(allowed.grammar_at)
    return usable(sequence, tuple(state.forced(sequence.tokens)[:MAX_FORCED]), vocab_size)
