"""Tokens are those of a sampler that keeps nothing, whatever is beside them and whatever came
before: a new one for each sequence and step, which reads all tokens of the sequence.

What it chooses is right by `device/test_sampler.py` and `device/test_sampling_law.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued, DraftedSequence
from disagg.engine.sched.step import SampledToken
from disagg.messages import SamplingParams
from tests.engine.device.test_sampler import new_sequence

VOCAB_SIZE = 600  # groups that are full, and one that is not

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1000),
    min_tokens=st.sampled_from([0, 0, 3]),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 300, 600, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.05, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.4, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, None, 0, 3]),
    logprobs_until=st.sampled_from([None, 2]),
    stop_token_ids=st.sampled_from([(), (3,), (1, 2, 599, 600, -1)]),
)
TOKENS = st.lists(st.integers(0, 12) | st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)


def logits_of(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


class Stepped:
    """A sampler that sees the same sequences again and again."""

    def __init__(self, num_slots: int = 1, vocab_size: int = VOCAB_SIZE) -> None:
        self.slots = Slots(num_slots)
        self.sampler = Sampler(self.slots, vocab_size, torch.device("cpu"))

    def sample(
        self, logits: Tensor, rows: list[Continued], num_unread: int = 0
    ) -> list[SampledToken]:
        owners = [row for row in rows if isinstance(row, Sequence)]
        self.sampler.enter([owner.slot for owner in self.slots.enter(owners)])
        for row in rows:
            if isinstance(row, DraftedSequence):
                row.slot = row.sequence.slot
        positions = torch.tensor([row.num_tokens - 1 + num_unread for row in rows])
        return self.sampler.sample(
            logits, rows, positions, num_unread=num_unread * len(rows)
        ).read()


def sample_anew(logits: Tensor, rows: SequenceOf[Continued]) -> list[SampledToken]:
    """The tokens of these rows, each by a sampler that has seen nothing before."""
    tokens = []
    for row, each in zip(logits, rows, strict=True):
        n = each.num_prompt_tokens
        alike = new_sequence(each.sampling, tuple(each.tokens[:n]), tuple(each.tokens[n:]))
        tokens += Stepped().sample(row.unsqueeze(0).clone(), [alike])
    return tokens


def check(found: list[SampledToken], expected: list[SampledToken]) -> None:
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    for token, wanted in zip(found, expected, strict=True):
        if wanted.logprobs is None:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-6)
        assert [i for i, _ in token.logprobs.top] == [i for i, _ in wanted.logprobs.top]


@given(st.data())
def test_batches_that_change(data: st.DataObject) -> None:
    """Some of several sequences are in each step, in any order; they end, and others come."""
    stepped = Stepped(data.draw(st.integers(1, 3)))

    def draw_sequence() -> Sequence:
        prompt, output = data.draw(TOKENS), data.draw(TOKENS)
        output = output[: data.draw(st.integers(0, 4))]  # of a moved one
        return new_sequence(data.draw(PARAMS), tuple(prompt), tuple(output))

    everybody = [draw_sequence() for _ in range(4)]
    for number in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.permutations(everybody))[: data.draw(st.integers(1, 4))]
        logits = logits_of(len(step), number)
        expected = sample_anew(logits.clone(), step)
        check(stepped.sample(logits, [*step]), expected)
        for sequence, token in zip(step, expected, strict=True):
            sequence.tokens.append(token.token_id)
        if data.draw(st.booleans()):
            everybody[data.draw(st.integers(0, 3))] = draw_sequence()


@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(2, 5))
def test_tokens_that_the_host_has_not_read(params: list[SamplingParams], num_steps: int) -> None:
    """Each step but the first is launched before the token of the one before is known."""
    stepped = Stepped()
    sequences = [new_sequence(each, (5, 6, 5), (7,)) for each in params]
    unread: list[int] = []
    for number in range(num_steps):
        logits = logits_of(len(sequences), number)
        found = stepped.sample(logits.clone(), [*sequences], num_unread=int(bool(unread)))
        for sequence, token_id in zip(sequences, unread, strict=bool(unread)):
            sequence.tokens.append(token_id)
        expected = sample_anew(logits, sequences)
        check(found, expected)
        unread = [token.token_id for token in expected]


@given(PARAMS, TOKENS, TOKENS, st.integers(0, 3), st.data())
def test_drafts(
    params: SamplingParams, prompt: list[int], draft: list[int], num_right: int, data: st.DataObject
) -> None:
    """Rows of a draft, and the steps after it, of which some of it came true."""
    stepped = Stepped()
    none: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    params = replace(params, repetition_penalty=1.0, **none)  # with penalties there are no drafts
    sequence = new_sequence(params, tuple(prompt))
    other = new_sequence(data.draw(PARAMS), (9, 8))
    sequence.draft = tuple(draft[:4])
    for number in range(3):
        rows: list[Continued] = [sequence]
        rows += [DraftedSequence(sequence, n + 1) for n in range(len(sequence.draft))]
        rows.append(other)
        logits = logits_of(len(rows), number)
        expected = sample_anew(logits.clone(), rows)
        check(stepped.sample(logits, rows), expected)
        sequence.tokens += [*sequence.draft[:num_right], expected[0].token_id]
        sequence.draft = sequence.draft[num_right:]
        other.tokens.append(expected[-1].token_id)


def test_many_tokens_at_once_and_a_row_that_grows() -> None:
    """What a device has not counted may be more than a draft: it is counted anew."""
    stepped = Stepped()
    asked: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.1, "top_p": 0.9}
    sequence = new_sequence(SamplingParams(max_tokens=3, **asked), (1,))
    other = new_sequence(SamplingParams(max_tokens=900, **asked), tuple(range(40)))
    for number, rows in enumerate([[sequence], [sequence, other], [other, sequence], [other]]):
        logits = logits_of(len(rows), number)
        expected = sample_anew(logits.clone(), rows)
        check(stepped.sample(logits, [*rows]), expected)
        sequence.tokens += range(100, 100 + 20 * number)
        other.tokens += range(7)
