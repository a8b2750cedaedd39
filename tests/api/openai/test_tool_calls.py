from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.openai.tool_calls import (
    HERMES,
    MISTRAL,
    WHOLE,
    CallFormat,
    CallReader,
    CallSyntax,
    format_of,
)

Found = list[tuple[str, object]]
ONE = '{"name": "look", "arguments": {"where": "</tool", "n": [1, 2.5]}}'
ARGUMENTS = {"where": "</tool", "n": [1, 2.5]}
OTHER = '{"name": "add", "parameters": {"a": "ü"}}'
BOTH: Found = [("look", ARGUMENTS), ("add", {"a": "ü"})]

CASES: list[tuple[CallFormat, str, str, Found]] = [
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", BOTH[:1]),
    (HERMES, f"Let me see.\n<tool_call>{ONE}</tool_call>\n", "Let me see.", BOTH[:1]),
    (HERMES, f"<tool_call>{ONE}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", BOTH),
    (HERMES, f"<tool_call>{ONE}</tool_call> Wait.", " Wait.", BOTH[:1]),
    (HERMES, f"<tool_call>{ONE}", "", BOTH[:1]),  # models forget the mark at the end
    (HERMES, "a <tool b </tool_call> c ", "a <tool b </tool_call> c ", []),
    (HERMES, "a <tool_call>no</tool_call> b", "a <tool_call>no</tool_call> b", []),
    (HERMES, f"<tool_call>no</tool_call><tool_call>{ONE}</tool_call>",
     "<tool_call>no</tool_call>", BOTH[:1]),
    (HERMES, f"{ONE}", f"{ONE}", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
     '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
     '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', []),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}, {OTHER}]", "", BOTH),
    (MISTRAL, f"Well[TOOL_CALLS]{ONE}", "Well", BOTH[:1]),
    (MISTRAL, "[TOOL_CALL", "[TOOL_CALL", []),
    (WHOLE, OTHER, "", BOTH[1:]),
    (WHOLE, f"<|python_tag|>{ONE}; {OTHER}", "", BOTH),
    (WHOLE, f" [{ONE},{OTHER}] ", "", BOTH),
    (WHOLE, f"I say {ONE}", f"I say {ONE}", []),
    (WHOLE, "<|python", "<|python", []),
    (WHOLE, '{"a": 1}', '{"a": 1}', []),
    (WHOLE, f"{ONE} and so on", f"{ONE} and so on", []),
    (WHOLE, '{"name": "f"}', "", [("f", {})]),
    (WHOLE, '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}', []),
    (WHOLE, "", "", []),
    (WHOLE, " \n", " \n", []),
    (WHOLE, "[" * 20_000, "[" * 20_000, []),
]  # fmt: skip


def read(syntax: CallSyntax, pieces: list[str]) -> tuple[str, Found]:
    """All that is said and called in an answer of these pieces."""
    reader = CallReader(syntax, "answer")
    said, calls = "", []
    for index, piece in enumerate(pieces):
        text, found = reader.push(piece, is_end=index == len(pieces) - 1)
        said += text
        calls += found
        assert reader.has_called == bool(calls)
    assert [call.number for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("form", "answer", "said", "calls"), CASES)
@given(cuts=st.lists(st.integers(0, 100), max_size=8))
def test_calls_are_found_wherever_an_answer_is_cut(
    form: CallFormat, answer: str, said: str, calls: Found, cuts: list[int]
) -> None:
    places = [0, *sorted(cuts), len(answer)]
    pieces = [answer[a:b] for a, b in zip(places, [*places[1:], len(answer)], strict=True)]
    assert read(CallSyntax(form), pieces) == (said, calls)
    few = answer if len(answer) < 1000 else ""
    assert read(CallSyntax(form), [*few, answer[len(few) :]]) == (said, calls)


def test_text_is_not_held_back_longer_than_it_is_open() -> None:
    reader = CallReader(CallSyntax(HERMES), "answer")
    assert reader.push("so <tool", is_end=False) == ("so", [])
    assert reader.push("s>", is_end=False) == (" <tools>", [])
    whole = CallReader(CallSyntax(WHOLE), "answer")
    assert whole.push(" so", is_end=False) == (" so", [])
    assert whole.push(" {", is_end=False) == (" {", [])


def test_one_call_is_all_where_one_is_wanted() -> None:
    reader = CallReader(CallSyntax(HERMES, parallel=False), "answer")
    said, calls = reader.push(f"<tool_call>{ONE}</tool_call>", is_end=False)
    assert said == "" and len(calls) == 1 and reader.is_done
    assert reader.push(f" <tool_call>{ONE}</tool_call>", is_end=True) == ("", [])
    several = CallReader(CallSyntax(WHOLE, parallel=False), "answer")
    assert len(several.push(f"[{ONE}, {OTHER}]", is_end=True)[1]) == 1


@pytest.mark.parametrize(
    ("answer", "calls"),
    [('{"a": 1}', [("f", {"a": 1})]), ("{}", [("f", {})]), ('{"a": ', []), ("[1]", [])],
)
def test_an_answer_may_be_the_arguments_of_one_function(answer: str, calls: Found) -> None:
    said = "" if calls else answer
    assert read(CallSyntax(function="f"), [answer]) == (said, calls)
    assert read(CallSyntax(function="f"), list(answer)) == (said, calls)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ tools }}<tool_call>\\n{{ call | tojson }}\\n</tool_call>", HERMES),
        ("{{ '[TOOL_CALLS] [' }}{{ tools }}", MISTRAL),
        ("""{{ '{"name": "' + call.name + '", "parameters": ' }}{{ tools }}""", WHOLE),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_how_calls_are_written(source: str, form: CallFormat | None) -> None:
    assert format_of(source) == form
