"""Decides which sequences get a draft, of which kind, and how long.

There are four kinds. The tokens that a grammar forces are always proposed: they are certain, so a
JSON answer's names and punctuation cost few steps. A `Proposer` is asked for by the configuration:
prompt lookup, or a smaller model. The answer of a cascade's smaller model comes with its request.
`speculation` verifies all of them in the same way.

A draft is as long as the time model says that it pays. It compares the tokens that a draft will
probably gain, by how far the sequence's last drafts were right, with the seconds that its tokens
add to the step. Where that is less than the step gains without, there is no draft. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from operator import attrgetter, mul
from typing import Protocol
from weakref import WeakKeyDictionary

from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step_budget import StepBudget

MAX_FORCED = 15  # tokens in one step; with the token before them they are a tile of attention

# What is believed of a sequence's drafts at first: at each position so many were tried, and such a
# share was right. Each new draft makes what is known count for less. If drafts do not pay, there is
# none for so many steps, and then half of what is known is forgotten, so that they are tried again.
NUM_ASSUMED, SHARE_ASSUMED, KEPT = 2.0, 0.6, 0.95
NUM_RESTS = 64

_GRAMMAR_STATE = attrgetter("grammar_state")


class Proposer(Protocol):
    """Proposes drafts for sequences that decode.

    num_tokens: most tokens of a draft.
    knows_ahead: whether it may propose before the sequence's last token is known. If not, no step
        is launched ahead while drafts pay.
    """

    num_tokens: int
    knows_ahead: bool

    def token_s(self, num_sequences: int) -> float:
        """Seconds that proposing one token more takes for so many sequences together."""
        ...

    def propose(self, limits: Mapping[Sequence, int]) -> Iterable[tuple[Sequence, tuple[int, ...]]]:
        """Drafts of at most so many tokens for these sequences, or for some of them."""
        ...


class Acceptance:
    """How far the drafts of one sequence were right lately.

    chances: for each position, the chance that a draft is right up to there.
    is_asked: whether its draft, if it has one, is the proposer's.
    """

    __slots__ = ("_num_rests", "_right", "_tried", "chances", "is_asked")

    def __init__(self, num_tokens: int) -> None:
        self._right = [0.0] * num_tokens
        self._tried = [0.0] * num_tokens
        self._num_rests = 0
        self.is_asked = False
        self._keep(1.0)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        for i in range(min(num_accepted + 1, num_drafted, len(self._tried))):
            self._tried[i] += 1.0
            self._right[i] += i < num_accepted
        self._keep(KEPT)
        self.is_asked = False

    def rest(self) -> None:
        """Record that a draft did not pay."""
        self._num_rests += 1
        if self._num_rests == NUM_RESTS:
            self._num_rests = 0
            self._keep(0.5)

    def _keep(self, share: float) -> None:
        for counts in (self._right, self._tried):
            counts[:] = [share * count for count in counts]
        shares = [
            (right + SHARE_ASSUMED * NUM_ASSUMED) / (tried + NUM_ASSUMED)
            for right, tried in zip(self._right, self._tried, strict=True)
        ]
        self.chances = [*accumulate(shares, mul)]


class Drafting:
    """Gives sequences their drafts.

    Args:
        step_budget: knows the time model, without which every draft has full length.
        proposer: None: only what grammars force is proposed.

    Attributes:
        num_accepted_at: for each position, how many drafts were right up to there.
    """

    def __init__(self, step_budget: StepBudget, proposer: Proposer | None = None) -> None:
        self.proposer = proposer
        self.num_drafts = 0
        self.num_accepted_at: list[int] = []
        self._step_budget = step_budget
        self._acceptance = WeakKeyDictionary[Sequence, Acceptance]()

    def propose(
        self, running: SequenceOf[Sequence], num_context: int, *, ahead: bool = False
    ) -> bool:
        """Give drafts to the running sequences that decode and have none.

        Args:
            num_context: computed tokens of all running sequences.
            ahead: a step is planned before the last one is read, so these sequences may have one
                token more. A draft of one token would then be of no use.

        Returns:
            False if a step must not be planned ahead, because drafts pay that cannot be made yet.
        """
        proposer = self.proposer
        if proposer is None and not any(map(_GRAMMAR_STATE, running)):
            return True
        others = []
        for sequence in running:
            is_decoding = len(sequence.tokens) - sequence.num_computed == 1
            # A sequence that is handed over leaves with its next token, so a draft is useless.
            if not is_decoding or sequence.hand_over or sequence.draft:
                continue
            if forced := _forced(sequence):
                if len(forced) > ahead:
                    sequence.draft = forced
            elif sequence.takes_drafts:
                others.append(sequence)
        if proposer is None or not others:
            return True
        limits = self._limits(proposer, others, len(running), num_context)
        if ahead and not proposer.knows_ahead:
            return not limits
        for sequence, draft in proposer.propose(limits):
            draft = draft[: _num_places(sequence)]
            if sequence.grammar_state is not None:
                draft = draft[: sequence.grammar_state.num_allowed(sequence.tokens, draft)]
            if len(draft) > ahead:
                sequence.draft = draft
                self._acceptance_of(sequence).is_asked = True
        return True

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record how far a draft was right."""
        self.num_drafts += 1
        missing = num_accepted - len(self.num_accepted_at)
        self.num_accepted_at += [0] * missing
        for i in range(num_accepted):
            self.num_accepted_at[i] += 1
        acceptance = self._acceptance.get(sequence)
        if acceptance is not None and acceptance.is_asked:
            acceptance.learn(num_drafted, num_accepted)

    def _limits(
        self, proposer: Proposer, sequences: list[Sequence], num_decodes: int, num_context: int
    ) -> dict[Sequence, int]:
        """How many tokens to propose for each sequence; only those for which some pay."""
        if self._step_budget.times is None:
            return dict.fromkeys(sequences, proposer.num_tokens)
        times = self._step_budget.times()
        gained, step_s = float(num_decodes), times.decode_step_s(num_decodes, num_context)
        drafted = [(each, self._acceptance_of(each).chances) for each in sequences]
        limits: dict[Sequence, int] = {}
        for place in range(proposer.num_tokens):
            least = times.per_sequence_s * gained / step_s
            drafted = [each for each in drafted if each[1][place] > least]
            gain = sum(chances[place] for _, chances in drafted)
            cost_s = len(drafted) * times.per_sequence_s + proposer.token_s(len(drafted))
            if not drafted or gain * step_s <= gained * cost_s:
                break
            gained, step_s = gained + gain, step_s + cost_s
            limits.update((sequence, place + 1) for sequence, _ in drafted)
        for sequence in sequences:
            if sequence not in limits:
                self._acceptance[sequence].rest()
        return limits

    def _acceptance_of(self, sequence: Sequence) -> Acceptance:
        found = self._acceptance.get(sequence)
        if found is None:
            assert self.proposer is not None
            self._acceptance[sequence] = found = Acceptance(self.proposer.num_tokens)
        return found


def _forced(sequence: Sequence) -> tuple[int, ...]:
    """The next tokens that the sequence's grammar forces."""
    state, thinking = sequence.grammar_state, sequence.thinking
    if state is None or sequence.sampling.has_penalties:
        return ()
    if thinking is not None:
        allowed = thinking.allowed(sequence.tokens, has_grammar=True)
        if allowed.grammar_at is None or allowed.also:
            return ()
        state.begin_at(allowed.grammar_at)
    return tuple(state.forced(sequence.tokens)[: min(MAX_FORCED, _num_places(sequence))])


def _num_places(sequence: Sequence) -> int:
    """The tokens of a draft that leave room for the one after it."""
    return max(0, sequence.max_num_tokens - 1 - len(sequence.tokens))
