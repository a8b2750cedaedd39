"""Answers of a real (tiny) engine whose reasoning has a budget, or is followed by a grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from disagg.engine.engine import Engine
from disagg.messages import Grammar, Thinking
from tests.engine.device.tiny_engine import EOS_ID, answer, run, sequence

START, END = 63, 31  # bytes that serve as marks; the last bits of their words
OPEN = Thinking(starts=((START,),), end=(END,), forced_end=(END,), is_open=True, budget=9)
DIGITS = Grammar("regex", "[0-9]{6}")


def test_reasoning_ends_with_its_budget_and_nobody_else_notices(engine: Engine) -> None:
    never: Any = {"bad_words_token_ids": ((END,),), "max_tokens": 40, "stop_token_ids": ()}
    alone = [sequence(None, seed=seed, **never) for seed in range(3)]
    run(engine, *alone)
    limited = [sequence(None, seed=seed, thinking=OPEN, **never) for seed in range(3)]
    beside = sequence(None, prompt=(9, 9), seed=0, **never)
    free = sequence(None, prompt=(9, 9), seed=0, **never)
    run(engine, free)
    run(engine, *limited, beside)
    for one, other in zip(limited, alone, strict=True):
        assert answer(one)[:9] == answer(other)[:9] and END not in answer(other)
        assert answer(one)[9] == END and len(answer(one)) == 40
        assert END not in answer(one)[10:]
        assert one.thinking is None and not one.needs_host
    assert answer(beside) == answer(free)


def test_a_grammar_waits_for_the_end_of_the_reasoning(engine: Engine, directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    digits = {tokenizer.token_to_id(digit) for digit in "0123456789"}
    made = sequence(DIGITS, thinking=OPEN, logit_bias=((EOS_ID, 50.0),), temperature=0.0)
    assert run(engine, made) == ["stop"]  # which it may not before the grammar is followed
    said = answer(made)
    end = said.index(END)
    assert end <= 9 and not set(said[:end]) <= digits
    assert len(said) == end + 8 and set(said[end + 1 : -1]) <= digits and said[-1] == EOS_ID


def test_a_model_may_think_first_or_answer_at_once(engine: Engine) -> None:
    thinking = Thinking(starts=((START,),), end=(END,), forced_end=(END,), budget=4)
    thinks = sequence(DIGITS, thinking=thinking, logit_bias=((START, 100.0),), temperature=0.0)
    answers = sequence(DIGITS, thinking=thinking, logit_bias=((START, -100.0),))
    assert run(engine, thinks, answers) == ["stop", "stop"]
    assert answer(thinks)[0] == START and answer(thinks)[5] == END and len(answer(thinks)) == 13
    assert len(answer(answers)) == 7
    # Elsewhere it goes on as if nothing had happened, wherever it was.
    for size in (1, 4, 5, 6, 9):
        moved = sequence(
            DIGITS, thinking=thinking, logit_bias=((START, 100.0),), temperature=0.0,
            output=tuple(answer(thinks)[:size]),
        )  # fmt: skip
        run(engine, moved)
        assert answer(moved) == answer(thinks)
