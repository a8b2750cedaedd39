"""Answers of a real (tiny) engine under grammars: right, repeatable, and nobody else's concern."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from disagg.config import EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.runner import ModelRunner
from disagg.engine.device.token_masks import TokenMasks
from disagg.engine.engine import Engine
from disagg.engine.sched.grammar import MAX_CACHED
from disagg.errors import GrammarError
from disagg.messages import Grammar
from disagg.models.description import describe_model
from tests.engine.device.tiny_engine import CONFIG, EOS_ID, answer, run, sequence
from tests.engine.sched.test_grammar import SCHEMAS, json_grammar
from tests.grids import examples


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(SCHEMAS, st.integers(0, 2**32))
@examples(10)
def test_every_answer_parses_and_validates(
    engine: Engine, tokenizer: Tokenizer, schema: Any, seed: int
) -> None:
    made = [
        sequence(json_grammar(schema), seed=seed),
        sequence(json_grammar(schema), temperature=0.0),
        sequence(json_grammar(schema), seed=seed, repetition_penalty=1.3, frequency_penalty=0.5),
        sequence(json_grammar(schema), seed=seed, top_k=3, top_p=0.9, temperature=1.7),
    ]
    ends = run(engine, *made)
    # A random model fills gaps with white space, so that its tokens may be over too soon.
    assert set(ends) <= {"stop", "length"}
    whole = [each for each, end in zip(made, ends, strict=True) if end == "stop"]
    assume(whole)
    for each in whole:
        assert answer(each)[-1] == EOS_ID
        jsonschema.validate(json.loads(tokenizer.decode(answer(each)[:-1])), schema)


def test_an_answer_that_is_cut_is_one_that_could_go_on(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    digits = sequence(Grammar("regex", "[0-9]{30}"), max_tokens=12)
    assert run(engine, digits) == ["length"]
    assert re.fullmatch("[0-9]{12}", tokenizer.decode(answer(digits)))


def test_others_in_the_batch_are_as_without(engine: Engine) -> None:
    alone = [sequence(None, prompt=(9, i), max_tokens=20, seed=i) for i in range(3)]
    run(engine, *alone)
    beside = [sequence(None, prompt=(9, i), max_tokens=20, seed=i) for i in range(3)]
    run(engine, beside[0], sequence(Grammar("regex", "[ab]{15}")), *beside[1:])
    assert [answer(each) for each in beside] == [answer(each) for each in alone]


def test_steps_launched_ahead_follow_grammars_as_steps_in_order_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the step after a grammar's end, of which the device learns too late."""
    assert isinstance(engine.runner, ModelRunner)
    found = []
    for launcher in (None, engine.runner):
        monkeypatch.setattr(engine, "launcher", launcher)
        made = [sequence(Grammar("regex", "[0-9]{2,12}"), prompt=(8, i), seed=i) for i in range(3)]
        made += [sequence(None, prompt=(9, i), max_tokens=30, seed=i) for i in range(3)]
        found.append((run(engine, *made), [answer(each) for each in made]))
    assert found[0] == found[1]
    assert found[0][0].count("stop") >= 3


def test_logprobs_are_of_the_model_itself(engine: Engine) -> None:
    free = sequence(None, temperature=0.0, logprobs=20, max_tokens=1)
    bound = sequence(Grammar("choice", '["#"]'), temperature=0.0, logprobs=20, max_tokens=1)
    tops, chosen = [], []
    for each in (free, bound):
        engine.submit(each)
        (event,) = [event for event in _events(engine) if event.logprobs]
        assert event.logprobs is not None
        tops.append(event.logprobs[0].top)
        chosen.append((event.token_ids[0], event.logprobs[0].logprob))
    assert tops[0] == tops[1]
    assert chosen[0] != chosen[1]
    assert math.isfinite(chosen[1][1])


def _events(engine: Engine) -> list[Any]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 11}])
def test_an_answer_goes_on_from_any_token(
    directory: Path, engine: Engine, sampling: dict[str, Any]
) -> None:
    grammar = Grammar("regex", r"([a-z]{2,4}, ){3}[0-9]{1,5}(end|END)")
    whole = sequence(grammar, **sampling)
    run(engine, whole)
    expected = answer(whole)
    elsewhere = build_engine(CONFIG, describe_model(directory))[0]
    for cut in range(1, len(expected)):
        moved = sequence(grammar, output=tuple(expected[:cut]), **sampling)
        assert run(elsewhere, moved) == ["stop"]
        assert answer(moved) == expected


def test_preemption_does_not_change_an_answer(directory: Path, engine: Engine) -> None:
    grammar = Grammar("regex", "([a-f]{3} ){10}")
    small = EngineConfig(**{**_fields(CONFIG), "num_gpu_blocks_override": 24, "max_model_len": 64})
    crowded = build_engine(small, describe_model(directory))[0]
    made = [[sequence(grammar, seed=i, max_tokens=50) for i in range(4)] for _ in range(2)]
    assert run(crowded, *made[0]) == ["stop"] * 4
    assert crowded.scheduler.num_preempted > 0
    for alone, each in zip(made[1], made[0], strict=True):
        run(engine, alone)
        assert answer(alone) == answer(each)


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_a_grammar_that_fails_ends_its_answer_alone(engine: Engine) -> None:
    grammar = Grammar("choice", '["abc"]')
    wrong = sequence(grammar, output=(3, 4))  # nobody generated that
    bystander, other = sequence(None, max_tokens=10, seed=3), sequence(grammar)
    ends = run(engine, wrong, bystander, other)
    assert ends[1:] == ["length", "stop"]
    assert ends[0] is not None and "grammar" in ends[0]
    assert answer(wrong) == [3, 4]
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_grammar_is_compiled_before_its_sequence_needs_it(engine: Engine) -> None:
    good = sequence(Grammar("regex", "[x-z]{3}"))
    while not engine.is_ready(good):
        pass
    assert run(engine, good) == ["stop"]
    assert engine.is_ready(sequence(None))
    with pytest.raises(GrammarError):
        for _ in iter(lambda: engine.is_ready(sequence(Grammar("regex", "("))), True):
            pass


def test_a_grammar_that_was_ready_stays_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come before its sequence's first step, none is compiled inside of it."""
    waits = sequence(Grammar("regex", "[x-z]{3}"))
    while not engine.is_ready(waits):
        pass
    assert engine.grammars is not None
    for number in range(MAX_CACHED + 1):
        engine.grammars.compile(Grammar("regex", f"other{number}")).result()

    def fails(grammar: Grammar) -> None:
        raise AssertionError("compiled in a step")

    monkeypatch.setattr(engine.grammars, "compile", fails)
    assert run(engine, waits) == ["stop"]


def test_masks_fit_models_with_more_rows_than_tokens_and_with_fewer() -> None:
    mask = torch.tensor([[0b101, -1]], dtype=torch.int32)  # tokens 0, 2, and 32 to 63
    for vocab_size in (100, 40, 2):
        logits = torch.zeros(3, vocab_size)
        TokenMasks([1], mask, torch.device("cpu")).apply_(logits)
        kept = [i for i in range(vocab_size) if logits[1, i] == 0.0]
        assert kept == [i for i in (0, 2, *range(32, 64)) if i < vocab_size]
        assert bool((logits[[0, 2]] == 0.0).all())
