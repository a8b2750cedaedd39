"""How long drafts are: as long as they pay, by the times of steps and by how many were right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest

from disagg.engine.sched.drafting import MOST_RESTS, NUM_CALM, NUM_RESTS, Drafting
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step_budget import StepBudget
from disagg.time_model import StepTimeModel
from tests.engine.workload import new_sequence

# A step takes 10 ms, and 1 ms for each token.
TIMES = StepTimeModel(per_step_s=0.010, per_sequence_s=0.001, per_context_s=0.0)


class Proposer:
    """Proposes what it is allowed to, and costs so many seconds a token."""

    num_tokens = 5
    knows_ahead = True
    spent_s = 0.0

    def __init__(self, token_s: float = 0.0) -> None:
        self._token_s = token_s
        self.limits: list[int] = []

    def token_s(self, num_sequences: int) -> float:
        return self._token_s

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        self.limits = [*limits.values()]
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


def test_what_does_not_pay_is_tried_again_ever_less_often() -> None:
    most = MOST_RESTS * (NUM_CALM + 1)
    lengths = play(drafting_with(Proposer(0.020)), decoding(), 0, 4 * most)
    tries = [step for step, length in enumerate(lengths) if length]
    assert max(lengths) == 1
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[:2] == [2 * NUM_RESTS * (NUM_CALM + 1), 4 * NUM_RESTS * (NUM_CALM + 1)]
    assert gaps == sorted(gaps) and gaps[-1] == most
    assert sum(map(bool, lengths)) / len(lengths) < 0.001


def test_new_sequences_begin_with_what_is_known_of_others() -> None:
    drafting = drafting_with(Proposer())
    for _ in range(20):
        play(drafting, decoding(), 0, 20)
    assert play(drafting, decoding(), 0, 1) == [0]
    for _ in range(40):
        play(drafting, decoding(), 5, 200)
    assert play(drafting, decoding(), 5, 1) == [5]
