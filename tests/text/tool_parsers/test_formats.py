"""Every format of calls, wherever an answer is cut into deltas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.text.chat_template import ChatTemplate
from disagg.text.tool_parsers.registry import tool_format_of
from disagg.text.tool_parsers.tags import types_of
from tests.grids import examples
from tests.text.answers import Found, cut, read, syntax_of

ARGUMENTS = '{"where": "</tool", "n": [1, 2.5]}'
ONE = f'{{"name": "look", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "rest", "parameters": {"a": "ü \\"}"}}'
LOOK = ("look", ARGUMENTS)
REST = ("rest", '{"a": "ü \\"}"}')
BOTH = (LOOK, REST)


Called: TypeAlias = tuple[str, dict[str, Any]]


def called(**arguments: Any) -> tuple[str, str]:
    return ("look", json.dumps(arguments, ensure_ascii=False))


HERMES = [
    (f"<tool_call>\n{ONE}\n</tool_call>", Found(calls=(LOOK,))),
    (f"Let me see.\n<tool_call>{ONE}</tool_call>\n", Found(text="Let me see.", calls=(LOOK,))),
    (f"<tool_call>{ONE}</tool_call>\n<tool_call>{OTHER}</tool_call>", Found(calls=BOTH)),
    (f"<tool_call>[{ONE}, {OTHER}]</tool_call>", Found(calls=BOTH)),
    (f"<tool_call>{ONE}</tool_call> Wait.", Found(text=" Wait.", calls=(LOOK,))),
    (f"<tool_call>{ONE}", Found(calls=(LOOK,))),  # models forget the mark at the end
    (f"<tool_call>{ONE}\n<tool_call>{OTHER}", Found(calls=BOTH)),
    ('<tool_call>{"arguments": {"a": 1}, "id": "x", "name": "look"}</tool_call>',
     Found(calls=(("look", '{"a": 1}'),))),
    ('<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}</tool_call>',
     Found(calls=(("look", '{"a": 1}'),))),  # JSON in JSON
    ('<tool_call>{"name": "rest"}</tool_call>', Found(calls=(("rest", "{}"),))),
    ('<tool_call>{"name": "rest", "arguments": null}</tool_call>', Found(calls=(("rest", "{}"),))),
    ('<tool_call>{"name": "look", "arguments": {"a": "</tool_call>"}}</tool_call>',
     Found(calls=(("look", '{"a": "</tool_call>"}'),))),
    # The answer is cut off: what there is of the call was sent already.
    ('<tool_call>{"name": "look", "arguments": {"a": ', Found(calls=(("look", '{"a": '),))),
    ('<tool_call>{"name": "look"', Found(text='<tool_call>{"name": "look"')),
    ("a <tool b </tool_call> c ", Found(text="a <tool b </tool_call> c ")),
    ("a <tool_call>no</tool_call> b", Found(text="a <tool_call>no</tool_call> b")),
    (f"<tool_call>no</tool_call><tool_call>{ONE}</tool_call>",
     Found(text="<tool_call>no</tool_call>", calls=(LOOK,))),
    (f"<tool_call><tool_call>{ONE}</tool_call>", Found(text="<tool_call>", calls=(LOOK,))),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     Found(text='<tool_call>{"name": "f", "arguments": [1]}</tool_call>')),
    ('<tool_call>{"name": 5}</tool_call>', Found(text='<tool_call>{"name": 5}</tool_call>')),
    (ONE, Found(text=ONE)),
]  # fmt: skip
LLAMA3_JSON = [
    (OTHER, Found(calls=(REST,))),
    (f"<|python_tag|>{ONE}; {OTHER}", Found(calls=BOTH)),
    (f" [{ONE},{OTHER}] ", Found(calls=BOTH)),
    (f"I say {ONE}", Found(text=f"I say {ONE}")),
    ("<|python", Found(text="<|python")),
    ('{"a": 1}', Found(text='{"a": 1}')),
    ('{"name": "Bob", "age": 5}', Found(text='{"name": "Bob", "age": 5}')),  # not a function's
    (f"{ONE} and so on", Found(text="and so on", calls=(LOOK,))),
    ('{"name": "rest"}', Found(calls=(("rest", "{}"),))),
    ('{"name": "rest", "arguments": [1]}', Found(text='{"name": "rest", "arguments": [1]}')),
    ("", Found()),
    (" \n", Found(text=" \n")),
    ("[" * 2000, Found(text="[" * 2000)),
]
MISTRAL = [
    (f"[TOOL_CALLS] [{ONE}, {OTHER}]", Found(calls=BOTH)),
    (f"Well[TOOL_CALLS]{ONE}", Found(text="Well", calls=(LOOK,))),
    (f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]rest[ARGS]{{}}",
     Found(calls=(LOOK, ("rest", "{}")))),
    (f"[TOOL_CALLS]look{ARGUMENTS}", Found(calls=(LOOK,))),
    (f"[TOOL_CALLS]look[CALL_ID]abc123XYZ[ARGS]{ARGUMENTS}", Found(calls=(LOOK,))),
    ("[TOOL_CALLS]look at this", Found(text="[TOOL_CALLS]look at this")),
    ("[TOOL_CALL", Found(text="[TOOL_CALL")),
]  # fmt: skip
GRANITE = [
    (f"<|tool_call|>[{ONE}, {OTHER}]", Found(calls=BOTH)),
    (f"<tool_call>[{ONE}]", Found(calls=(LOOK,))),
    (f"Well <|tool_call|> [{ONE}]<|/tool_call|>", Found(text="Well", calls=(LOOK,))),
    ("<|tool_call|>[]", Found(text="<|tool_call|>[]")),
]
SEP = "<｜tool▁sep｜>"
DEEPSEEK = [
    (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}look\n```json\n{ARGUMENTS}\n```"
     f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function{SEP}rest\n```json\n{{}}\n```"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", Found(calls=(LOOK, ("rest", "{}")))),
    (f"Well.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look{SEP}{ARGUMENTS}<｜tool▁call▁end｜>"
     f"<｜tool▁call▁begin｜>rest{SEP}{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     Found(text="Well.", calls=(LOOK, ("rest", "{}")))),
    (f"<｜tool▁call▁begin｜>look{SEP}{ARGUMENTS}", Found(calls=(LOOK,))),
    (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look{SEP}" '{"a": "b',
     Found(calls=(("look", '{"a": "b'),))),
    ("<｜tool▁calls▁begin｜> no", Found(text="<｜tool▁calls▁begin｜> no")),
    ("<｜tool▁call▁begin｜>no<｜", Found(text="<｜tool▁call▁begin｜>no<｜")),
]  # fmt: skip
KIMI_K2 = [
    *(
        (f"<|tool_call_begin|>{call_id}\n<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
         Found(calls=(LOOK,)))
        for call_id in ("\nfunctions.look:0", "functions_look_0", "look:3", "look")
    ),
    ("<|tool_call_begin|>call_12ab<|tool_call_argument_begin|>{}",
     Found(text="<|tool_call_begin|>call_12ab<|tool_call_argument_begin|>{}")),
    ("Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
     f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.rest:1"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
     Found(text="Well.", calls=(LOOK, ("rest", "{}")))),
]  # fmt: skip
CODE = 'if a < b:\n    print("ü\\n")\n'
QWEN3_CODER = [
    ("I look.\n<tool_call>\n<function=look>\n<parameter=where>\nParis\n</parameter>\n"
     "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
     Found(text="I look.", calls=(called(where="Paris", n=3),))),
    ("<tool_call>\n<function=look>\n<parameter=deep>\nTrue\n</parameter>\n<parameter=tags>\n"
     "['a', \"b\"]\n</parameter>\n<parameter=place>\n{\"x\": 1}\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=rest>\n</function>\n</tool_call>",
     Found(calls=(called(deep=True, tags=["a", "b"], place={"x": 1}), ("rest", "{}")))),
    (f"<tool_call>\n<function=look>\n<parameter=where>\n{CODE}\n</parameter>\n</function>\n"
     "</tool_call>", Found(calls=(called(where=CODE),))),
    ("<function=look>\n<parameter=note>\nnull\n</parameter>\n</function>",
     Found(calls=(called(note=None),))),
    ("<function=look><parameter=note>3</parameter></function>", Found(calls=(called(note="3"),))),
    ("<function=look>\n<parameter=where>\na\n<parameter=n>\n4\n</function>",
     Found(calls=(called(where="a", n=4),))),  # marks that were forgotten
    ("<tool_call>\n<function=look>\n<parameter=where>\nPar", Found(calls=(
        ("look", '{"where": "Par'),))),
    ("<tool_call>\n<function=look>\n<parameter=n>\nsome\n</parameter>\n</function>",
     Found(calls=(called(n="some"),))),  # not of its type: the function will say so
    ("<function=look> hello <function=look>\n</function>",
     Found(text="<function=look> hello", calls=(called(),))),
    ("<function=look>\n<parameter=where>\n<parameter=z>\n</parameter></function>",
     Found(calls=(called(where="<parameter=z>"),))),
    ("<function=look>\n<parameter=n>\n4\n</parameter></function>no</function>",
     Found(text="no</function>", calls=(called(n=4),))),
    ("<function=rest><tool_call><function=rest></function>",
     Found(calls=(("rest", "{}"), ("rest", "{}")))),
    ("<function=look>\n<parameter=where>\n<p></parameter>\n</p>\n</parameter>\n"
     "<parameter=n>\n4\n</parameter>\n</function>",
     Found(calls=(called(where="<p></parameter>\n</p>", n=4),))),
    # A value may contain a whole call: no tag that ends a value follows the value's own end.
    ("<tool_call>\n<function=look>\n<parameter=where>\n<function=f>\n<parameter=a>\n1\n"
     "</parameter>\n</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
     Found(calls=(called(where="<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
                               "</tool_call>"),))),
    # What the function may have decides whether a tag after a value's end is an argument.
    ("<function=only>\n<parameter=code>\na</parameter>\n<parameter=b>\nc\n</parameter>\n"
     "</function>", Found(calls=(("only", '{"code": "a</parameter>\\n<parameter=b>\\nc"}'),))),
    ("<function=look>\n<parameter=where>\na\n</parameter>\n<parameter=b>\nc\n</parameter>\n"
     "</function>", Found(calls=(called(where="a", b="c"),))),
    # Another format.
    ('<function=look>{"where": "a"}</function>',
     Found(text='<function=look>{"where": "a"}</function>')),
    ("a <tool_call> b", Found(text="a <tool_call> b")),
    ("<function=", Found(text="<function=")),
]  # fmt: skip
GLM45 = [
    ("I look.\n<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>Paris</arg_value>\n"
     "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
     Found(text="I look.", calls=(called(where="Paris", n=3),))),
    ("<tool_call>look<arg_key>where</arg_key><arg_value>a <b> c</arg_value></tool_call>"
     "<tool_call>rest</tool_call>", Found(calls=(called(where="a <b> c"), ("rest", "{}")))),
    ("<tool_call>rest\n</tool_call>", Found(calls=(("rest", "{}"),))),
    ("<tool_call>look\n<arg_key>unknown</arg_key>\n<arg_value>[1, {}]</arg_value>\n</tool_call>",
     Found(calls=(called(unknown=[1, {}]),))),
    ("<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>Par",
     Found(calls=(("look", '{"where": "Par'),))),
    ("<tool_call>look around</tool_call>", Found(text="<tool_call>look around</tool_call>")),
]  # fmt: skip
PYTHONIC = [
    ("[look(where=\"Paris\", n=2), rest()]", Found(calls=(called(where="Paris", n=2),
                                                          ("rest", "{}")))),
    ("<|python_start|>[look(where='it\\'s, (there)', tags=['a', \"b]\"], place={'x': (1, -2.5)}, "
     "deep=True, note=None)]<|python_end|>",
     Found(calls=(called(where="it's, (there)", tags=["a", "b]"], place={"x": [1, -2.5]},
                         deep=True, note=None),))),
    ("[look( where = 'a' ,)]", Found(calls=(called(where="a"),))),
    ("[look(where='\\d+\\n\\1')]", Found(calls=(called(where="\\d+\n\\1"),))),
    ("[look(where=here)]", Found(calls=(called(where="here"),))),  # no literal: as it was written
    # Half of a surrogate pair has no UTF-8, so no answer could have it.
    ("[look(where='\\ud800')]", Found(calls=(called(where="'\\ud800'"),))),
    ("[look(where='Par", Found(calls=(("look", '{"where": '),))),
    ("[1, 2]", Found(text="[1, 2]")),
    ("[look('a')]", Found(text="[look('a')]")),
    ("[walk(where='a')]", Found(text="[walk(where='a')]")),  # nobody offered it
    ("[look(where=\"a\")] Done.", Found(text="Done.", calls=(called(where="a"),))),
]  # fmt: skip
MINIMAX_M2 = [
    ('I look.\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="where">Paris'
     '</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
     Found(text="I look.", calls=(called(where="Paris", n=3),))),
    ('<minimax:tool_call>\n<invoke name="look">\n<parameter name="tags">["a", "b"]</parameter>\n'
     '</invoke>\n<invoke name="rest">\n</invoke>\n</minimax:tool_call>',
     Found(calls=(called(tags=["a", "b"]), ("rest", "{}")))),
    (f'<minimax:tool_call><invoke name="look"><parameter name="where">{CODE}</parameter></invoke>',
     Found(calls=(called(where=CODE),))),
    ('<minimax:tool_call>\n<invoke name="look">\n<parameter name="where">Par',
     Found(calls=(("look", '{"where": "Par'),))),
    ('<minimax:tool_call>\n<invoke name="look">\n<parameter name="n">4</invoke>',
     Found(calls=(called(n=4),))),  # a mark that was forgotten
    ("<minimax:tool_call> no", Found(text="<minimax:tool_call> no")),
    ("<invoke name=look", Found(text="<invoke name=look")),
]  # fmt: skip
CASES = [
    (name, *case)
    for name, cases in {
        "hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL, "granite": GRANITE,
        "deepseek_v3": DEEPSEEK, "kimi_k2": KIMI_K2, "qwen3_coder": QWEN3_CODER, "glm45": GLM45,
        "minimax_m2": MINIMAX_M2, "pythonic": PYTHONIC,
    }.items()
    for case in cases
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "found"), CASES)
@examples(10)
@given(places=st.lists(st.integers(0, 400), max_size=8))
def test_calls_are_found_wherever_an_answer_is_cut(
    name: str, answer: str, found: Found, places: list[int]
) -> None:
    syntax = syntax_of(name)
    assert read(syntax, cut(answer, places)) == found
    assert read(syntax, [*answer[:500], answer[500:]]) == found


def _json(calls: list[Called], between: str) -> str:
    return between.join(json.dumps({"name": n, "arguments": a}) for n, a in calls)


def _tags(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _braces(value: Any) -> str:
    """As Gemma 4 writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{k}:{_braces(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_braces, value)) + "]"
    return json.dumps(value)


# How models write calls, in pieces between which there may be white space.
WRITERS: dict[str, Callable[[Called], list[str]]] = {
    "hermes": lambda c: ["<tool_call>", _json([c], ""), "</tool_call>"],
    "llama3_json": lambda c: [_json([c], ""), ";"],
    "mistral": lambda c: ["[TOOL_CALLS]", c[0], "[ARGS]", json.dumps(c[1])],
    "granite": lambda c: ["<|tool_call|>", "[", _json([c, c], ", "), "]"],
    "deepseek_v3": lambda c: [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", SEP, c[0], "\n```json\n",
        json.dumps(c[1]), "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    ],
    "deepseek_v31": lambda c: [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", c[0], SEP, json.dumps(c[1]),
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    ],
    "kimi_k2": lambda c: [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", f"functions.{c[0]}:0",
        "<|tool_call_argument_begin|>", json.dumps(c[1]), "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
    "qwen3_coder": lambda c: [
        "<tool_call>", f"<function={c[0]}>",
        *(f"<parameter={k}>\n{_tags(v)}\n</parameter>" for k, v in c[1].items()),
        "</function>", "</tool_call>",
    ],
    "glm45": lambda c: [
        f"<tool_call>{c[0]}",
        *(piece for k, v in c[1].items()
          for piece in (f"<arg_key>{k}</arg_key>", f"<arg_value>{_tags(v)}</arg_value>")),
        "</tool_call>",
    ],
    "minimax_m2": lambda c: [
        "<minimax:tool_call>", f'<invoke name="{c[0]}">',
        *(f'<parameter name="{k}">{_tags(v)}</parameter>' for k, v in c[1].items()),
        "</invoke>", "</minimax:tool_call>",
    ],
    "deepseek_v32": lambda c: [
        "<｜DSML｜function_calls>", f'<｜DSML｜invoke name="{c[0]}">',
        *(f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{_tags(v)}'
          "</｜DSML｜parameter>" for k, v in c[1].items()),
        "</｜DSML｜invoke>", "</｜DSML｜function_calls>",
    ],
    "minicpm5": lambda c: [
        f'<function name="{c[0]}">',
        *(f'<param name="{k}">{_tags(v)}</param>' for k, v in c[1].items()),
        "</function>",
    ],
    "hy_v3": lambda c: [
        "<tool_calls:opensource>", "<tool_call:opensource>", c[0], "<tool_sep:opensource>",
        *(piece for k, v in c[1].items()
          for piece in (f"<arg_key:opensource>{k}</arg_key:opensource>",
                        f"<arg_value:opensource>{_tags(v)}</arg_value:opensource>")),
        "</tool_call:opensource>", "</tool_calls:opensource>",
    ],
    "cohere_command3": lambda c: [
        "<|START_ACTION|>", "[",
        json.dumps({"tool_call_id": "0", "tool_name": c[0], "parameters": c[1]}), "]",
        "<|END_ACTION|>",
    ],
    "functionary": lambda c: [f"<function={c[0]}>", json.dumps(c[1]), "</function>"],
    "gigachat3": lambda c: ["<|function_call|>", _json([c], "")],
    "nemotron_json": lambda c: ["<TOOLCALL>", "[", _json([c, c], ", "), "]", "</TOOLCALL>"],
    "minimax": lambda c: ["<tool_calls>", _json([c], ""), _json([c], ""), "</tool_calls>"],
    "gemma4": lambda c: ["<|tool_call>", "call:" + c[0], _braces(c[1]), "<tool_call|>"],
    "lfm2": lambda c: [
        "<|tool_call_start|>", "[", c[0] + "(", ", ".join(f"{k}={v!r}" for k, v in c[1].items()),
        ")", "]", "<|tool_call_end|>",
    ],
    "openai": lambda c: [
        f"<|channel|>commentary to=functions.{c[0]} ", "<|constrain|>json", "<|message|>",
        json.dumps(c[1]), "<|call|>",
    ],
    "pythonic": lambda c: [
        "[", c[0] + "(", ", ".join(f"{k}={v!r}" for k, v in c[1].items()), ")", "]",
    ],
}  # fmt: skip
TEXTS = st.lists(
    st.sampled_from(["a", "ü", "\n", " ", '"', "{", "<b>", "</b>", "</parameter>", "</arg_value>",
                     "<tool_call>", "</tool>", "<|x|>", "\\", "}", "]", "'"]), max_size=8
).map("".join)  # fmt: skip
CALLS = st.tuples(
    st.just("look"),
    st.fixed_dictionaries(
        {},
        optional={
            "where": TEXTS, "n": st.integers(-9, 99), "deep": st.booleans(),
            "tags": st.lists(TEXTS, max_size=2),
            "place": st.dictionaries(st.sampled_from("ab"), TEXTS, max_size=2),
        },
    ),
)  # fmt: skip
SPACES = st.sampled_from(["", "", " ", "\n", "\n\n", "\r\n", "\t"])


@pytest.mark.parametrize("name", WRITERS)
@examples(26)
@given(call=CALLS, data=st.data(), places=st.lists(st.integers(0, 400), max_size=8))
def test_what_models_write_is_read(
    name: str, call: Called, data: st.DataObject, places: list[int]
) -> None:
    """Whatever white space is between the marks, and whatever marks are in values."""
    answer = "".join(data.draw(SPACES) + piece for piece in WRITERS[name](call))
    found = read(syntax_of(name), cut(answer, places))
    assert not found.text
    assert {name for name, _ in found.calls} == {"look"}
    assert all(json.loads(arguments) == call[1] for _, arguments in found.calls)


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"openai"}))  # its marks are never text
@given(call=CALLS, places=st.lists(st.integers(0, 400), max_size=8))
@examples(10)
def test_a_call_of_a_function_that_was_not_offered_is_text(
    name: str, call: Called, places: list[int]
) -> None:
    answer = "".join(WRITERS[name](("walk", call[1])))
    assert read(syntax_of(name), cut(answer, places)) == Found(text=answer)


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"llama3_json", "pythonic", "openai"}))
def test_a_call_ends_reasoning_that_has_no_end(name: str) -> None:
    answer = "<think>So I look.\n" + "".join(WRITERS[name](("look", {"where": "here"})))
    found = read(syntax_of(name, "qwen3"), list(answer))
    assert (found.reasoning, found.text) == ("So I look.", "")
    assert json.loads(found.calls[0][1]) == {"where": "here"}


PIECES = [
    "look", "<function=", ">", "\n", '{"name": "look"', ",", '"arguments": {', "}", "[", "]", '"',
    "\\", " ", "{}", "é", ":", "(", ")", "=", "where", "'",
    *("<parameter=", "</parameter>", "</function>", '<param name="where">', "</param>"),
    *(f"<{slash}{tag}>" for tag in ("tool_call", "arg_key", "arg_value", "minimax:tool_call",
      "invoke", "tool_calls", "TOOLCALL") for slash in ("", "/")),
    '<invoke name="look">', '<parameter name="where">', '<function name="look">',
    *("<｜tool▁call▁begin｜>", SEP, "<｜tool▁calls▁end｜>", "[TOOL_CALLS]", "[ARGS]"),
    *("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="look">', "</｜DSML｜invoke>"),
    *('<｜DSML｜parameter name="where" string="true">', "</｜DSML｜parameter>"),
    *("<|tool_call>", "call:look{", '<|"|>', "<tool_call|>", "<|START_ACTION|>", '"tool_name": '),
    *("<|tool_call_start|>", "<|tool_call_end|>", "look(", "<tool_sep:opensource>"),
    *("<tool_call:opensource>", "<arg_key:opensource>", "</arg_value:opensource>"),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"openai"}))
@examples(20)
@given(
    answer=st.lists(st.sampled_from(PIECES), max_size=30),
    places=st.lists(st.integers(0, 400), max_size=8),
)
def test_nonsense_reads_the_same_however_it_is_cut(
    name: str, answer: list[str], places: list[int]
) -> None:
    whole = "".join(answer)
    syntax = syntax_of(name)
    found = read(syntax, [whole])
    assert read(syntax, cut(whole, places)) == found
    assert read(syntax, [*whole, ""]) == found
    if not found.calls:
        assert found.text == whole


SHOWN = (
    "{%% for m in messages %%}<|{{ m.role }}|>{{ m.content or '' }}"
    "{%% for call in m.tool_calls or [] %%}{%% set c = call.function %%}%s{%% endfor %%}<|end|>"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|><think>{%% endif %%}"
)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ tools }}<tool_call>\\n{{ call | tojson }}\\n</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}{{ tools }}", "mistral"),
        ("""{{ '{"name": "' + call.name + '", "parameters": ' }}{{ tools }}""", "llama3_json"),
        ("<tool_call>\\n<function={{ call.name }}>", "qwen3_coder"),
        ("<tool_call>{{ call.name }}\\n<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax_m2"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3"),
        ("<|start|>assistant<|channel|>", "openai"),
        ("{{ messages }}", ""),
        # What it shows counts, if it shows calls.
        (SHOWN % "<tool_call>{{ c | tojson }}</tool_call>", "hermes"),
        (SHOWN % '[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}', "mistral"),
        (SHOWN % """{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}""",
         "llama3_json"),
        (SHOWN % '<|START_ACTION|>[{"tool_name": "{{ c.name }}", "parameters":'
         " {{ c.arguments | tojson }}}]<|END_ACTION|>", "cohere_command3"),
        ("{# <tool_call> #}" + SHOWN % "<tool_calls>[{{ c | tojson }}]</tool_calls>", "minimax"),
        (SHOWN % "<function={{ c.name }}>{{ c.arguments | tojson }}</function>", "functionary"),
        # Apertus': of no format, although it has texts of some.
        (SHOWN % '<tool_call>[{"{{ c.name }}": {{ c.arguments | tojson }}}]</tool_call>', ""),
        # Llama 4's tells the model another format than it shows.
        ("[func_name1(" + SHOWN % '{"name": "{{ c.name }}", "parameters": {{ c.arguments }}}',
         "pythonic"),
        # Kimi-K2's shows the id of a call, which has the name.
        (SHOWN % "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
         "{{ c.arguments | tojson }}<|tool_call_end|>", "kimi_k2"),
    ],
)  # fmt: skip
def test_the_template_says_how_calls_are_written(source: str, name: str) -> None:
    form = tool_format_of(ChatTemplate(source, {}))
    assert (form.names[0] if form else "") == name


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"anyOf": [{"type": "string"}, {"enum": [1, None]}]}, {"string", "integer", "null"}),
        ({"type": ["string", {}, 5]}, {"string"}),  # clients send what they like
        ({"type": {}, "oneOf": 5, "anyOf": [3, {"type": []}]}, set()),
        ({"enum": {}}, set()),
        (True, set()),
    ],
)
def test_types_are_read_from_any_schema(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types
