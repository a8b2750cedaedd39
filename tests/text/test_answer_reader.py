"""Reasoning, text and calls of an answer, and how much of it is held back meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.text.answer_delta import AnswerDelta, CallDelta
from disagg.text.answer_reader import (
    AnswerReader,
    AnswerSyntax,
    read_arguments_of,
    reasoning_format_of,
)
from disagg.text.tool_parsers.registry import NAMES
from tests.grids import examples
from tests.text.answers import Found, cut, read, syntax_of

CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'
WALK = CALL.replace("look", "walk")
LOOK = ("look", '{"where": "here"}')
OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

THINK = [
    ("", "<think>\nSo.\n\nYes.\n</think>\n\nHi!", Found("So.\n\nYes.", "Hi!")),
    ("", "\n<think>So</think>Hi", Found("So", "Hi")),  # GLM's
    (OPEN, "So.\n</think>\n\n  Hi", Found("So.", "  Hi")),
    (OPEN, "<think>\nSo.\n</think>\nHi", Found("So.", "Hi")),  # the model repeats the mark
    (CLOSED, "Hi", Found(text="Hi")),
    ("", "Hi", Found(text="Hi")),
    ("", " \n Hi", Found(text=" \n Hi")),
    ("", "I <think> so</think>", Found(text="I <think> so</think>")),
    (OPEN, "So.", Found("So.")),
    # Models forget the end of the reasoning before a call. A call of no offered function is none.
    (OPEN, f"So. \n{CALL}", Found("So.", calls=(LOOK,))),
    (OPEN, f"So. \n{CALL} And so", Found("So.", " And so", (LOOK,))),
    (OPEN, f"So. \n{CALL}\n</think>\n\n", Found("So.", calls=(LOOK,))),
    (OPEN, f"<tool_call> or {WALK} is how</think>Hi", Found(f"<tool_call> or {WALK} is how", "Hi")),
    (OPEN, "So. </thi", Found("So. </thi")),
    (
        OPEN,
        f"Shall I {CALL}?</think>\n\nWell.\n{CALL}",
        Found("Shall I", "?\n\nWell.", (LOOK, LOOK)),  # a call ends the reasoning
    ),
    ("", f"<think></think>{CALL}", Found(calls=(LOOK,))),
    ("", CALL, Found(calls=(LOOK,))),
    ("", "", Found()),
]
HEADER = "<|start|>assistant"
HARMONY = [
    ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi!",
     Found("So.", "Hi!")),
    ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary"
     ' to=functions.look <|constrain|>json<|message|>{"where": "here"}<|call|>',
     Found("So.", calls=(LOOK,))),
    ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>"
     "I look.<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>"
     '{"where": "here"}', Found("So.", "I look.", (LOOK,))),
    (" to=functions.rest<|channel|>commentary<|message|><|call|>", Found(calls=(("rest", "{}"),))),
    ("<|channel|>commentary to=functions.look<|message|>{\"wh",
     Found(calls=(("look", '{"wh'),))),
    (" to=functions.rest<|channel|>commentary<|message|>", Found(calls=(("rest", "{}"),))),
    ("<|channel|>analysis to=python<|message|>print(1)<|call|>", Found("print(1)")),
    ("<|channel|>analysis<|message|>So.<|channel|>final<|message|>Hi", Found("So.", "Hi")),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", Found(text="{}")),
    ("Hi there", Found(text="Hi there")),
    ("<|end|>assistant<|channel|>final<|message|>Hi", Found(text="Hi")),
    ("<|channel|>analysis<|message|>So.<|end|>\nassistant\n<|channel|>final<|message|>Hi",
     Found("So.", "Hi")),
    ("assistants help", Found(text="assistants help")),
    ("<|channel|>commentary to=functions.walk<|message|>{}", Found(text="{}")),  # nobody offered it
    ("<|channel|>analysis<|mess", Found()),
]  # fmt: skip


@pytest.mark.parametrize(("tail", "answer", "found"), THINK)
@examples(10)
@given(places=st.lists(st.integers(0, 200), max_size=8))
def test_reasoning_is_neither_text_nor_calls(
    tail: str, answer: str, found: Found, places: list[int]
) -> None:
    syntax = syntax_of("hermes", "qwen3")
    assert read(syntax, cut(answer, places), tail) == found
    assert read(syntax, list(answer) or [""], tail) == found


@pytest.mark.parametrize(("answer", "found"), HARMONY)
@examples(10)
@given(places=st.lists(st.integers(0, 200), max_size=8))
def test_harmony(answer: str, found: Found, places: list[int]) -> None:
    syntax = syntax_of("openai", "openai_gptoss")
    for end in ("", "<|return|>", "<|end|>")[: 1 if "mess" in answer[-5:] else 3]:
        assert read(syntax, cut(answer + end, places), HEADER) == found
        assert read(syntax, list(answer + end), HEADER) == found


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("deepseek_r1", "So.</think>Hi"),  # inside, though no mark says so
        ("granite", "Here is my thought process:\nSo.\nHere is my response:\nHi"),
        ("mistral", "[THINK]So.[/THINK]Hi"),
        ("seed_oss", "<seed:think>So.</seed:think>Hi"),
        ("gemma4", "<|channel>thought\nSo.\n<channel|>Hi"),
        ("cohere_command3", "<|START_THINKING|>So.<|END_THINKING|>Hi"),
    ],
)
def test_marks_of_other_families(name: str, answer: str) -> None:
    assert read(syntax_of("", name), list(answer)) == Found("So.", "Hi")


def test_the_template_says_how_reasoning_is_written() -> None:
    shown = {
        "{{ '<think>' }}": "qwen3", "{{ '<|channel|>analysis' }}": "openai_gptoss",
        "[THINK]": "mistral", "{{ messages }}": "", "{{ '<|channel>thought' }}": "gemma4",
        "{{ '<|START_THINKING|>' }}": "cohere_command3",
    }  # fmt: skip
    for source, name in shown.items():
        found = reasoning_format_of(source)
        assert (found.names[0] if found else "") == name


def test_what_is_reasoning_is_known_after_each_token() -> None:
    reader = AnswerReader(syntax_of("", "qwen3"), "answer", OPEN)
    assert reader.is_reasoning
    reader.push("So", is_end=False)
    assert reader.is_reasoning
    assert reader.push("</think>", is_end=False) == AnswerDelta("", "", [])
    assert not reader.is_reasoning


def test_nothing_is_held_back_longer_than_it_is_open() -> None:
    reader = AnswerReader(syntax_of("hermes", "qwen3"), "answer", OPEN)
    assert reader.push("so </th", is_end=False).reasoning == "so"
    assert reader.push("at>", is_end=False).reasoning == " </that>"
    assert reader.push("</think>\nso <tool", is_end=False).text == "so"
    assert reader.push("s>", is_end=False).text == " <tools>"
    (begun,) = reader.push(' <tool_call>{"name": "look", "arguments": {', is_end=False).calls
    assert (begun.name, begun.arguments) == ("look", "{")
    (more,) = reader.push('"where": "he', is_end=False).calls
    assert more == CallDelta(0, '"where": "he')
    whole = AnswerReader(syntax_of("llama3_json"), "answer")
    assert whole.push(" so", is_end=False).text == " so"
    assert whole.push(" {", is_end=False).text == " {"
    typed = AnswerReader(syntax_of("qwen3_coder"), "answer")
    typed.push("<tool_call>\n<function=look>\n<parameter=where>\n", is_end=False)
    assert typed.push('a "b"', is_end=False).calls[0].arguments == 'a \\"b\\"'


def test_one_call_is_all_where_one_is_wanted() -> None:
    reader = AnswerReader(syntax_of("hermes", parallel=False), "answer")
    delta = reader.push(f"{CALL}{CALL} and more", is_end=False)
    assert delta.text == "" and len(delta.calls) == 1 and reader.is_done
    assert reader.push(f" {CALL}", is_end=True) == AnswerDelta("", "", [])
    unclosed = AnswerReader(syntax_of("qwen3_coder", parallel=False), "answer")
    delta = unclosed.push("<function=rest></function> and more <function=rest>", is_end=False)
    assert delta.text == "" and unclosed.is_done
    assert [call.arguments for call in delta.calls] == ["{}"]
    both = '[{"name": "rest"}, {"name": "rest"}]'
    assert len(read(syntax_of("llama3_json", parallel=False), list(both)).calls) == 1


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (' {"a": 1}\n', Found(calls=(("f", '{"a": 1}'),))),
        ("{}", Found(calls=(("f", "{}"),))),
        ('{"a": ', Found(calls=(("f", '{"a": '),))),  # cut off: so far it was sent already
        ("[1]", Found(text="[1]")),
    ],
)
def test_an_answer_may_be_the_arguments_of_one_function(answer: str, found: Found) -> None:
    syntax = AnswerSyntax(reader=read_arguments_of("f"), tools={"f": {}})
    assert read(syntax, [answer]) == found
    assert read(syntax, list(answer)) == found


HOSTILE = [
    "[", "{", '{"name": "look", "arguments": {"a": ', "<tool_call>", " ", "\\", '"', "\n<",
    "<function=look>\n<parameter=where>\n", "[look(where=(", "<|channel|>", "<think>",
    "<｜tool▁call▁begin｜>look",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("name", sorted({*NAMES} - {"none", "qwen3_xml", "glm47"}))
def test_hostile_answers_leave_little_unread(name: str, piece: str) -> None:
    """Each character is looked at a bounded number of times, so an answer takes linear time."""
    reasoning = "openai_gptoss" if name == "openai" else "qwen3"
    reader = AnswerReader(syntax_of(name, reasoning), "answer")
    for _ in range(600):
        reader.push(piece, is_end=False)
        assert len(reader._text._text) < 100 + len(piece)
    reader.push("", is_end=True)


def test_a_call_without_arguments_is_complete_where_the_model_ended_its_answer() -> None:
    """GPT-OSS ends with the token that ends the call, which is no text."""
    text = " to=functions.rest<|channel|>commentary<|message|>"
    for is_cut, arguments in ((False, "{}"), (True, "")):
        reader = AnswerReader(syntax_of("openai", "openai_gptoss"), "answer", HEADER)
        (call,) = reader.push(text, is_end=True, is_cut=is_cut).calls
        assert (call.name, call.arguments) == ("rest", arguments)
