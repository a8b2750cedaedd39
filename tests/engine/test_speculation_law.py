"""Whatever is proposed, an answer is the one without drafts: to the token, for each seed.

Tokens are drawn with noise that depends on seed and position only. So the law of answers with
drafts is that without, also where a draft depends on the same noise, if for each seed and every
draft the answer is the same. Over a tiny vocabulary that is enumerated here.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.engine.device.build import build_engine
from disagg.engine.engine import Engine
from disagg.engine.sched import drafting
from disagg.engine.sched.prompt_lookup import PromptLookup
from disagg.messages import Grammar
from disagg.models.description import describe_model
from tests.engine.device.tiny_engine import CONFIG, EOS_ID, answer, run, sequence

TOKENS = (64, 65, 66)  # all that the model may say: a, b, c
WORDS = Grammar("regex", "[abc]{2,5}c")
RECORD = Grammar(
    "regex",
    r'\{"customer_name": "(Ada Lovelace|Alan Turing)", "is_subscribed": (true|false), "tags":'
    r' \[("red"|"green")(, ("red"|"green")){0,2}\]\}',
)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.4},
    "top-k": {"temperature": 1.4, "top_k": 2},
    "top-p": {"temperature": 1.4, "top_p": 0.6},
    "min-p": {"temperature": 1.4, "min_p": 0.4},
    "bias": {"temperature": 1.4, "logit_bias": ((65, 1.0),)},
    "bad words": {"bad_words_token_ids": ((64, 65), (66, 66), (65, 64, 66))},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "at least": {"temperature": 1.4, "stop_token_ids": (65,), "min_tokens": 2},
    "log-probabilities": {"temperature": 1.4, "logprobs": 2},
    "grammar": {"temperature": 1.4, "grammar": WORDS},
}


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    # The sums of a step depend on its rows unless they are those of float32 in one thread.
    return build_engine(replace(CONFIG, max_num_batched_tokens=64), describe_model(directory))[0]


def said(engine: Engine, grammar: Grammar | None, **asked: Any) -> tuple[Any, ...]:
    """An answer, its log-probabilities to five digits, and how it ended."""
    one = sequence(grammar, **asked)
    engine.submit(one)
    logprobs: list[float] = []
    last = None
    while engine.has_work:
        for event in engine.step():
            logprobs += [round(each.logprob, 4) for each in event.logprobs or ()]
            last = event.finish_reason or event.error
    return answer(one), logprobs, last


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_draft(name: str, engine: Engine) -> None:
    asked = {"max_tokens": 6, **SAMPLINGS[name]}
    grammar = asked.pop("grammar", None)
    if grammar is None:
        asked["allowed_token_ids"] = TOKENS
    before = engine.scheduler.num_drafted, engine.scheduler.num_accepted
    told = set()
    for seed in range(3):
        expected = said(engine, grammar, seed=seed, **asked)
        told.add(tuple(expected[0]))
        for draft in product((*TOKENS, EOS_ID), repeat=2):
            assert said(engine, grammar, seed=seed, draft=draft, **asked) == expected, draft
    num_drafted = engine.scheduler.num_drafted - before[0]
    num_accepted = engine.scheduler.num_accepted - before[1]
    if name == "penalties":
        assert not num_drafted
    else:
        assert num_drafted > num_accepted > 0
    assert len(told) > 1 or name == "greedy", "the noise matters"


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in order", "ahead"])
@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 1.2}], ids=str)
def test_tokens_that_a_grammar_forces(
    asked: dict[str, Any], is_ahead: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are all accepted, so names and punctuation of JSON cost few steps."""
    monkeypatch.setattr(engine, "launcher", engine.runner if is_ahead else None)
    scheduler, found = engine.scheduler, []
    for max_forced in (0, drafting.MAX_FORCED):
        monkeypatch.setattr(drafting, "MAX_FORCED", max_forced)
        before = scheduler.num_drafted, scheduler.num_accepted
        made = [sequence(RECORD, prompt=(9, i), seed=i, **asked) for i in range(3)]
        made += [sequence(None, prompt=(8, i), seed=i, max_tokens=40, **asked) for i in range(3)]
        ends = run(engine, *made)
        found.append((ends, [answer(each) for each in made]))
        num_drafted = scheduler.num_drafted - before[0]
        assert scheduler.num_accepted - before[1] == num_drafted
        assert (num_drafted > 60) == (max_forced > 0)
    assert found[0] == found[1]
    assert found[0][0][:3] == ["stop"] * 3


def test_a_grammar_cuts_the_drafts_of_others(engine: Engine) -> None:
    """What was said before is proposed only as far as the grammar allows it."""
    asked: dict[str, Any] = {"prompt": (64, 65, 66, 9, 9, 64, 65), "temperature": 0.0}
    expected = said(engine, WORDS, **asked)
    engine.scheduler.drafting.proposer = PromptLookup(4, 1)
    try:
        assert said(engine, WORDS, **asked) == expected
    finally:
        engine.scheduler.drafting.proposer = None
