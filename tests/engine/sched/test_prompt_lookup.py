"""Drafts from a sequence's own tokens: what is proposed, and that no answer changes by it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from disagg.config import ASSETS, SpeculativeConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched import prompt_lookup
from disagg.engine.sched.drafting import Drafting
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step_budget import StepBudget
from disagg.models.description import describe_model
from tests.engine import fake_runner, workload
from tests.engine.device.test_runner import config
from tests.engine.device.test_runner import new_sequence as new_request
from tests.engine.workload import Driver, Workload, new_sequence
from tests.worker import members
from tests.worker.rehearsal import play_many

BLOCK_SIZE = 4


def decoding(prompt: tuple[int, ...], output: tuple[int, ...] = (), **asked: Any) -> Sequence:
    sequence = new_sequence(prompt, BLOCK_SIZE, output=output, **{"max_tokens": 100, **asked})
    sequence.num_computed = len(sequence.tokens) - 1
    return sequence


def draft_for(sequence: Sequence, num_tokens: int = 4, match_length: int = 2) -> tuple[int, ...]:
    lookup = PromptLookup(num_tokens, match_length)
    Drafting(StepBudget(64), 1000, lookup).propose([sequence], 0)
    return sequence.draft


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 1, 2), (3, 4, 5, 6)),
        ((1, 2, 3, 9, 1, 2, 8, 9, 1, 2), (8, 9, 1, 2)),  # the latest place, not the first
        ((1, 2, 3, 1, 2), (3, 1, 2, 3)),  # goes round
        ((5, 5, 5), (5, 5, 5, 5)),
        ((1, 2, 3, 4, 5), ()),
        ((2, 1, 2), ()),  # the run itself is no earlier place
        ((7,), ()),
    ],
)
def test_what_came_after_the_last_tokens_before_is_proposed(
    tokens: tuple[int, ...], draft: tuple[int, ...]
) -> None:
    assert draft_for(decoding(tokens)) == draft


def test_a_draft_leaves_a_place_for_the_token_after_it() -> None:
    prompt = (1, 2, 3, 4, 5, 6, 1, 2)
    assert draft_for(decoding(prompt, max_tokens=3)) == (3, 4)
    assert draft_for(decoding(prompt, max_tokens=1)) == ()


def test_what_grew_is_found_and_nothing_is_indexed_twice() -> None:
    sequence, lookup = decoding((1, 2, 3)), PromptLookup(2, 2)
    drafting = Drafting(StepBudget(64), 1000, lookup)
    seen = [tuple(sequence.draft)]
    for token_id in (9, 1, 2):
        sequence.tokens.append(token_id)
        sequence.num_computed += 1
        drafting.propose([sequence], 0)
        seen.append(sequence.draft)
    assert seen == [(), (), (), (3, 9)]
    sequence.draft = ()
    drafting.propose([sequence], 0)
    assert sequence.draft == (), "a draft that was dropped is not proposed again at once"


def test_only_the_end_of_a_long_prompt_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "MAX_INDEXED", 4)
    assert draft_for(decoding((1, 2, 3, 4, 5, 6, 7, 8, 1, 2))) == ()
    assert draft_for(decoding((1, 2, 3, 4, 5, 6, 7, 8, 6, 7))) == (8, 6, 7, 8)


def test_some_are_left_alone() -> None:
    repeating = (1, 2, 3, 4, 1, 2)
    assert draft_for(decoding(repeating, hand_over=True)) == ()
    has_chunks_left = decoding(repeating)
    has_chunks_left.num_computed -= 1
    assert draft_for(has_chunks_left) == ()
    has_draft = decoding(repeating, draft=(7,))
    assert draft_for(has_draft) == (7,)
    penalised = new_request("penalised", list(repeating), repetition_penalty=1.1)
    penalised.num_computed = len(repeating) - 1
    assert draft_for(penalised) == ()


PLAYED = settings(max_examples=30, deadline=None, database=None, derandomize=True)


def scheduler_with_drafts(**arguments: Any) -> Scheduler:
    return Scheduler(**arguments, proposer=PromptLookup(num_tokens=3, match_length=1))


def test_random_workloads_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiny caches, with arrivals and hand-overs; one token decides, so some are right."""
    monkeypatch.setattr(
        workload, "Scheduler", lambda pool, **a: scheduler_with_drafts(pool=pool, **a)
    )
    monkeypatch.setattr(fake_runner, "VOCAB_SIZE", 12)
    met = dict.fromkeys(("drafted", "accepted"), 0)

    @PLAYED
    @given(workload.workloads())
    def played(drawn: Workload) -> None:
        driver = Driver(drawn)
        driver.play()
        scheduler = driver.engine.scheduler
        met["drafted"] += scheduler.num_drafted
        met["accepted"] += scheduler.num_accepted

    played()
    assert met["drafted"] - met["accepted"] >= 10 and met["accepted"] >= 10, met


def test_requests_that_move_between_workers_answer_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through lost tickets, torn pulls, drains and deaths, with drafts on every worker."""
    monkeypatch.setattr(
        members, "Scheduler", lambda pool, **a: scheduler_with_drafts(pool=pool, **a)
    )
    monkeypatch.setattr(fake_runner, "VOCAB_SIZE", 12)
    tally = play_many(num_steps=3_000)
    assert not any(tally.failures.values()), tally.failures


def test_what_repeats_takes_fewer_steps() -> None:
    """Or verification would be for nothing. The model is made to say what it just read."""
    lookup = SpeculativeConfig(method="ngram")
    engine, _ = build_engine(
        config(max_model_len=256, num_gpu_blocks_override=64, speculative_config=lookup),
        describe_model(ASSETS / "demo-small"),
    )
    sequence = new_request("again", [5, 6, 7, 8] * 8, max_tokens=64, temperature=0.0)
    engine.submit(sequence)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert sequence.num_output_tokens == 64
    num_prompt_steps = -(-32 // 7)  # of seven tokens, the last of which brings one of the answer
    assert num_steps == num_prompt_steps + 63 - engine.scheduler.num_accepted
    assert engine.scheduler.num_accepted > 16
