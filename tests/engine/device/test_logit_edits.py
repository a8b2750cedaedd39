"""Logit bias, allowed tokens and bad words: each row gets its own, whoever else is there."""

from __future__ import annotations

import pytest
import torch

from disagg.engine.device.logit_edits import BANNED, LogitEdits
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.device.token_masks import TokenMasks
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import DraftedSequence
from disagg.messages import SamplingParams
from tests.engine.device.test_sampler import (
    VOCAB_SIZE,
    draw_many,
    new_sequence,
    params,
    random_logits,
)

CPU = torch.device("cpu")


def edited(logits: torch.Tensor, *sequences: Sequence | DraftedSequence) -> torch.Tensor:
    edits = LogitEdits.from_params([each.sampling for each in sequences], logits.shape[1], CPU)
    assert edits is not None
    edits.apply_(logits, sequences)
    return logits


def test_each_row_has_its_own_edits() -> None:
    logits = random_logits(4)
    expected = logits.clone()
    expected[0, 3] += 2.5
    expected[0, 7] -= 100.0
    expected[1] = BANNED
    expected[1, [4, 9]] = logits[1, [4, 9]]
    expected[1, 9] += 1.0
    expected[3, 5] = BANNED
    rows = [
        params(logit_bias=((3, 2.5), (7, -100.0))),
        params(allowed_token_ids=(4, 9), logit_bias=((9, 1.0), (8, 99.0))),
        params(),
        params(bad_words_token_ids=((5,), (6, 7))),
    ]
    found = edited(logits.clone(), *map(new_sequence, rows))
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert torch.equal(found[1, [4, 9]], expected[1, [4, 9]])
    others = [i for i in range(VOCAB_SIZE) if i not in (4, 9)]
    assert (found[1, others] <= BANNED / 2).all()


def test_nothing_is_made_where_nothing_is_edited() -> None:
    assert LogitEdits.from_params([params(), params(temperature=0.0)], VOCAB_SIZE, CPU) is None


@pytest.mark.parametrize(
    ("output", "banned"),
    [((), []), ((5,), []), ((6,), [7]), ((5, 6), [7]), ((8, 9), [10]), ((9,), []), ((6, 8), [])],
)
def test_the_last_token_of_a_bad_word_is_banned_where_the_answer_has_the_others(
    output: tuple[int, ...], banned: list[int]
) -> None:
    words = ((6, 7), (8, 9, 10))
    sequence = new_sequence(params(bad_words_token_ids=words), (1, 8, 6), output)
    assert sequence.needs_host
    found = edited(torch.zeros(1, VOCAB_SIZE), sequence)
    assert (found[0] == BANNED).nonzero().flatten().tolist() == banned


def test_a_draft_is_a_part_of_the_answer() -> None:
    sequence = new_sequence(params(bad_words_token_ids=((6, 7),), logit_bias=((1, 9.0),)))
    sequence.draft = (6, 6)
    found = edited(torch.zeros(2, VOCAB_SIZE), sequence, DraftedSequence(sequence, 1))
    assert found[:, 1].tolist() == [9.0, 9.0]
    assert found[:, 7].tolist() == [0.0, pytest.approx(BANNED)]


def test_drawn_tokens_are_allowed_ones() -> None:
    row = random_logits(1)[0]
    for options in ({}, {"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.9}, {"repetition_penalty": 2.0}):
        drawn = draw_many(row, 200, allowed_token_ids=(3, 4, 11), **options)
        assert set(drawn) <= {3, 4, 11}, options
    assert {3, 4, 11} == set(draw_many(torch.zeros(VOCAB_SIZE), 200, allowed_token_ids=(3, 4, 11)))


def test_edits_are_uploaded_only_when_a_steps_sequences_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    real = LogitEdits.__init__

    def init(self: LogitEdits, rows: list[SamplingParams], *args: object) -> None:
        made.append(len(rows))
        real(self, rows, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LogitEdits, "__init__", init)
    slots = Slots()
    sampler = Sampler(slots, VOCAB_SIZE, CPU)
    sequences = [new_sequence(params(temperature=0.0, logit_bias=((9, 100.0),))) for _ in range(2)]

    def step(some: list[Sequence]) -> list[int]:
        sampler.enter([new.slot for new in slots.enter(some)])
        positions = torch.tensor([each.num_tokens - 1 for each in some])
        tokens = sampler.sample(random_logits(len(some)), some, positions).read()
        return [token.token_id for token in tokens]

    assert [step(sequences) for _ in range(3)] == [[9, 9]] * 3
    assert made == [2]
    assert step(sequences[:1]) == [9]
    assert made == [2, 1]


@pytest.mark.parametrize(
    "wanted", [{"allowed_token_ids": (4,)}, {"bad_words_token_ids": ((5, 3),)}]
)
def test_what_a_mask_forbids_stays_forbidden(wanted: dict[str, tuple[object, ...]]) -> None:
    """As where a reasoning's end must be written now: only token 3 may come, whatever was asked."""
    logits = random_logits(1)
    TokenMasks([0], torch.tensor([[1 << 3]], dtype=torch.int32), CPU).apply_(logits)
    sequence = new_sequence(params(**wanted), (1, 8), (5,))
    found = edited(logits, sequence)
    assert found.argmax() == 3
    assert (found[0] == -torch.inf).sum() == VOCAB_SIZE - 1
