"""Where reasoning stands, by the tokens of an answer alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.thinking import Allowed, ThinkingState
from disagg.messages import Grammar, Thinking
from tests.generate_requests import new_sequence

START, END, BREAK = 10, 11, 12
THINK = Thinking(starts=((START,), (BREAK, START)), end=(END,), forced_end=(END,))
OPEN = Thinking(starts=((START,),), end=(END,), forced_end=(END,), is_open=True)
# channel analysis message ... end start assistant channel final, message
HARMONY = Thinking(
    starts=((20, 21, 22),), end=(20, 25), forced_end=(23, 24, 20, 25), then=(22,), is_framed=True
)
PROMPT = [1, 2, START, 3]


def with_budget(thinking: Thinking, budget: int | None) -> Thinking:
    return replace(thinking, budget=budget)


def allowed(
    thinking: Thinking, answer: list[int], budget: int | None = None, *, has_grammar: bool = True
) -> Allowed:
    """What may follow `answer`: the same whether it came token by token or at once."""
    state = ThinkingState(with_budget(thinking, budget), len(PROMPT))
    found = [
        state.allowed(PROMPT + answer[:size], has_grammar=has_grammar)
        for size in range(len(answer) + 1)
    ]
    moved = ThinkingState(with_budget(thinking, budget), len(PROMPT))
    assert moved.allowed(PROMPT + answer, has_grammar=has_grammar) == found[-1]
    return found[-1]


@pytest.mark.parametrize(
    ("thinking", "answer", "wanted"),
    [
        (THINK, [], Allowed(grammar_at=4, also=(START,))),  # it may think, or answer at once
        (THINK, [5, 6], Allowed(grammar_at=4)),
        (THINK, [5, START, 6], Allowed(grammar_at=4)),
        (THINK, [START], Allowed(is_end=False)),
        (THINK, [BREAK, START, 6], Allowed(is_end=False)),
        (THINK, [START, 6, 7, END], Allowed(grammar_at=8)),
        (THINK, [START, 6, END, 8, END, 9], Allowed(grammar_at=7)),
        (OPEN, [], Allowed(is_end=False)),
        (OPEN, [5, 6], Allowed(is_end=False)),
        (OPEN, [END], Allowed(grammar_at=5)),
        (HARMONY, [], Allowed()),
        (HARMONY, [20, 21, 22, 5, 20], Allowed()),
        (HARMONY, [20, 21, 22, 5, 23, 24, 20, 25], Allowed(22)),
        (HARMONY, [20, 25], Allowed(22)),
        (HARMONY, [20, 25, 22], Allowed(grammar_at=7)),
        (HARMONY, [20, 25, 22, 5], Allowed(grammar_at=7)),
    ],
)
def test_a_grammar_begins_behind_the_reasoning(
    thinking: Thinking, answer: list[int], wanted: Allowed
) -> None:
    assert allowed(thinking, answer) == wanted
    assert allowed(thinking, answer, has_grammar=False) == Allowed()


@pytest.mark.parametrize(
    ("thinking", "answer", "budget", "forced"),
    [
        (OPEN, [], 0, END),
        (OPEN, [5, 6], 3, None),
        (OPEN, [5, 6, 7], 3, END),
        (OPEN, [5, 6, 7, END], 3, None),
        (OPEN, [5, END, 7], 3, None),  # it was over before
        (THINK, [], 0, None),
        (THINK, [START], 0, END),
        (THINK, [BREAK, START, 5], 1, END),
        (THINK, [5, 6, 7], 1, None),  # it did not think
        (HARMONY, [20, 21, 22], 0, 23),
        (HARMONY, [20, 21, 22, 5, 23, 24], 1, 20),
        (HARMONY, [20, 21, 22, 5, 23, 24, 20], 1, 25),
        (HARMONY, [20, 25, 22, 5, 5, 5], 1, None),
    ],
)
def test_a_budget_ends_the_reasoning(
    thinking: Thinking, answer: list[int], budget: int, forced: int | None
) -> None:
    found = allowed(thinking, answer, budget, has_grammar=False)
    assert found == (Allowed() if forced is None else Allowed(forced))
    if forced is not None:
        assert allowed(thinking, answer, budget).only == forced


def sequence(thinking: Thinking, grammar: Grammar | None = None) -> Sequence:
    return new_sequence(
        PROMPT, max_tokens=1000, thinking=thinking, grammar=grammar, draft_token_ids=(7, 8)
    )


def test_what_is_over_costs_nothing_more() -> None:
    of = sequence(with_budget(OPEN, 50))
    of.tokens += [5, 6]
    of.watch_thinking()
    assert of.thinking is not None and of.needs_host and not of.takes_drafts
    of.tokens.append(END)
    of.watch_thinking()
    assert of.thinking is None and not of.needs_host and of.takes_drafts
    bound = sequence(OPEN, Grammar("regex", "a"))
    bound.tokens += [5, END]
    bound.watch_thinking()
    assert bound.thinking is not None and bound.needs_host and not bound.takes_drafts
