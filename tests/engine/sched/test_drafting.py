"""How long drafts are: as long as they pay, by the times of steps and by how many were right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest

from disagg.engine.sched import drafting as drafting_module
from disagg.engine.sched import trials
from disagg.engine.sched.drafting import NUM_CALM, Drafting
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step_budget import StepBudget
from disagg.time_model import StepTimeModel
from tests.engine.workload import new_sequence

# A step takes 10 ms, and 1 ms for each token.
TIMES = StepTimeModel(per_step_s=0.010, per_sequence_s=0.001, per_context_s=0.0)


class Proposer:
    """Proposes what it is allowed to, and costs so many seconds a token.

    num_deaf: times that it is asked before each draft, without proposing anything.
    entry: seconds before the first draft of a sequence.
    """

    num_tokens = 5

    def __init__(
        self,
        token_s: float = 0.0,
        num_deaf: int = 0,
        *,
        knows_ahead: bool = True,
        entry: float = 0.0,
    ) -> None:
        self._entry_s = entry
        self._entered = set[Sequence]()
        self._token_s = token_s
        self._num_deaf = num_deaf
        self._num_asked = 0
        self.knows_ahead = knows_ahead
        self.spent_s = 0.0
        self.limits: list[int] = []

    def token_s(self, num_sequences: int, place: int) -> float:
        return self._token_s

    def entry_s(self, sequence: Sequence) -> float:
        return 0.0 if sequence in self._entered else self._entry_s

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        self.limits = [*limits.values()]
        self._num_asked += bool(limits)
        if limits and self._num_asked > self._num_deaf:
            self._num_asked = 0
            self.spent_s += self._token_s * max(limits.values())
            self._entered.update(limits)
            for sequence, limit in limits.items():
                yield sequence, (7,) * limit


def drafting_with(proposer: Proposer, times: StepTimeModel | None = TIMES) -> Drafting:
    budget = StepBudget(64)
    budget.times = None if times is None else lambda: times
    return Drafting(budget, 1000, proposer)


def decoding(num: int = 1) -> list[Sequence]:
    made = [new_sequence((1, 2, 3), 4, 100) for _ in range(num)]
    for sequence in made:
        sequence.num_computed = 2
    return made


def play(
    drafting: Drafting, sequences: list[Sequence], num_right: int, num_steps: int
) -> list[int]:
    """The lengths of the first one's drafts, of which so many tokens are right."""
    lengths = []
    for _ in range(num_steps):
        drafting.propose(sequences, 0)
        lengths.append(len(sequences[0].draft))
        for sequence in sequences:
            if sequence.draft:
                num_drafted = len(sequence.draft)
                drafting.learn(sequence, num_drafted, min(num_right, num_drafted))
            sequence.draft = ()
    return lengths


def test_without_a_time_model_drafts_have_full_length() -> None:
    assert play(drafting_with(Proposer(), None), decoding(), 0, 9) == [5] * 9


@pytest.mark.parametrize("num_right", [1, 2, 3])
def test_a_draft_becomes_as_long_as_it_is_right(num_right: int) -> None:
    """A token that is seldom right is still worth a tenth of a step."""
    lengths = play(drafting_with(Proposer()), decoding(), num_right, 100)
    assert num_right <= max(lengths[40:]) <= num_right + 1
    assert play(drafting_with(Proposer()), decoding(), 5, 20)[-1] == 5


def test_many_sequences_leave_no_time_to_spare() -> None:
    """With 200 of them a token pays only if it is right nearly always."""
    assert play(drafting_with(Proposer()), decoding(8), 5, 9)[-1] == 5
    assert play(drafting_with(Proposer()), decoding(200), 5, 9)[-1] == 0


@pytest.mark.parametrize(("token_s", "length"), [(0.0, 5), (0.002, 5), (0.020, 0)])
def test_a_model_that_is_slow_pays_less(token_s: float, length: int) -> None:
    assert play(drafting_with(Proposer(token_s)), decoding(), 5, 200)[-1] == length


def test_a_prompt_is_computed_for_an_answer_that_has_lasted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step with a draft is believed to gain 10.4 ms at first; 0.1 s are worth ten of these. It is
    not worth it for the last tokens of an answer."""
    monkeypatch.setattr(drafting_module, "NUM_CALM", 0)
    for max_tokens, first in ((100, 10), (15, 14)):
        (sequence,) = decoding()
        sequence.max_num_tokens = len(sequence.tokens) + max_tokens
        drafting, lengths = drafting_with(Proposer(entry=0.1)), list[int]()
        drafting._trials.cost_s = 1e9  # no trial
        for _ in range(max_tokens - 1):
            lengths += play(drafting, [sequence], 5, 1)
            sequence.tokens.append(7)
            sequence.num_computed += 1
        assert not any(lengths[:first]) and all(lengths[first:])


@pytest.mark.parametrize("num_deaf", [0, 5])
def test_what_does_not_pay_is_tried_in_a_small_part_of_the_time(num_deaf: int) -> None:
    """As long as it takes until there is a draft, by each sequence in turn."""
    proposer, sequences = Proposer(0.008, num_deaf), decoding(2)
    drafting, tries = drafting_with(proposer), list[tuple[int, Sequence]]()
    for step in range(10_000):
        drafting.propose(sequences, 0)
        for each in sequences:
            if each.draft:
                tries.append((step, each))
                drafting.learn(each, len(each.draft), 0)
                assert each.draft == (7,) * 5, "so that what long drafts take is known, too"
            each.draft = ()
    gaps = [after - before for (before, _), (after, _) in pairwise(tries)]
    # A trial takes 40 ms for its draft and 11 for a step with it, and a step of
    # two tokens 12.
    least = 0.051 / trials.SHARE / 0.012
    assert len(gaps) > 9
    assert all(least <= gap <= least + 2 * (NUM_CALM + 1) for gap in gaps[1:]), gaps
    assert [each for _, each in tries[1:]] == [sequences[n % 2] for n in range(1, len(tries))]


def test_a_trial_ends_without_a_draft_at_last() -> None:
    proposer = Proposer(0.040, 10 * trials.NUM_STEPS)
    drafting, sequences, num_asked = drafting_with(proposer), decoding(2), 0
    for _ in range(16 * trials.NUM_STEPS):
        drafting.propose(sequences, 0)
        num_asked += bool(proposer.limits)
    assert trials.NUM_STEPS < num_asked < 4 * trials.NUM_STEPS


def test_a_trial_also_comes_to_who_is_always_under_way() -> None:
    """Who then sits out a step, so that its draft can be made."""
    proposer = Proposer(0.040, knows_ahead=False)
    drafting, (one, other) = drafting_with(proposer), decoding(2)
    assert drafting.propose([one, other], 0, [one, other]) == [one]
    assert drafting.is_worth_a_step(one)
    assert drafting.propose([one, other], 0, [other]) == []
    assert one.draft == (7,) * 5 and not other.draft


def test_new_sequences_begin_with_what_is_known_of_others() -> None:
    drafting = drafting_with(Proposer())
    for _ in range(20):
        play(drafting, decoding(), 0, 20)
    assert play(drafting, decoding(), 0, 1) == [0]
    for _ in range(40):
        play(drafting, decoding(), 5, 200)
    assert play(drafting, decoding(), 5, 1) == [5]
