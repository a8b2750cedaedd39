"""Whatever schema a function has, a call that is required is a call of it with an object."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.openai.fields import (
    ChatRequest,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)
from disagg.api.openai.requests import answer_syntax, required_calls
from disagg.messages import Grammar
from disagg.text.tool_parsers.registry import NAMES
from tests.api.fakes import served_model
from tests.grids import examples
from tests.text.answers import cut, read

MODEL = served_model(template="{{ tools }}{{ messages }}")
BYTES = llguidance.LLTokenizer("byte")
SCALARS = st.sampled_from(
    [{"type": "boolean"}, {"type": "null"}, {"enum": ["a", 5]}, {"type": ["integer", "null"]}, {}]
)
PROPERTIES = st.fixed_dictionaries(
    {"properties": st.dictionaries(st.sampled_from("abc"), SCALARS, max_size=2)},
    optional={"type": st.sampled_from(["object", ["object", "null"]])},
)
PARTS = st.lists(PROPERTIES | SCALARS, max_size=2).map(lambda parts: [*parts, {"properties": {}}])
SCHEMAS = st.one_of(
    st.none(),
    st.just({}),
    st.just({"description": "takes anything"}),
    PROPERTIES,
    st.builds(lambda parts: {"anyOf": parts}, PARTS),
    st.builds(lambda part: {"oneOf": [part, {"type": "null"}]}, PROPERTIES),
    st.builds(lambda part: {"allOf": [part]}, PROPERTIES),
    st.builds(lambda part: {"$ref": "#/$defs/x", "$defs": {"x": part}}, PROPERTIES),
)


def written(grammar: Grammar, seed: int) -> str:
    """An answer that the grammar allows, by a model that soon closes what it has opened."""
    source = llguidance.grammar_from("json_schema", grammar.source)
    matcher = llguidance.LLMatcher(BYTES, source)
    assert not matcher.is_error(), matcher.get_error()
    rng, answer = random.Random(seed), bytearray()
    while not matcher.is_stopped():
        bias = matcher.compute_logit_bias()
        allowed = [token for token in range(len(bias)) if bias[token]]
        ends = [token for token in allowed if token >= 256 or chr(token) in '"}]']
        others = [token for token in allowed if token not in b" \n\t\r"]
        token = rng.choice(ends if ends and (rng.random() < 0.7 or len(answer) > 150) else others)
        assert matcher.consume_token(token)
        if token < 256:
            answer.append(token)
    return answer.decode(errors="replace")


@pytest.mark.parametrize("is_named", [True, False])
@examples(20)
@given(
    schema=SCHEMAS,
    seed=st.integers(0, 1 << 20),
    places=st.lists(st.integers(0, 200)),
    parser=st.sampled_from(NAMES),
)
def test_arguments_are_an_object(
    is_named: bool, schema: dict[str, Any] | None, seed: int, places: list[int], parser: str
) -> None:
    """Also whatever the format in which the model calls functions of its own accord."""
    tool = Tool("function", FunctionDefinition("look", parameters=schema))
    choice: ToolChoice = NamedTool("function", NamedFunction("look")) if is_named else "required"
    request = ChatRequest(messages=[], tools=[tool], tool_choice=choice)
    grammar = required_calls(request)
    assert grammar is not None
    syntax = answer_syntax(request, replace(MODEL, tool_call_parser=parser))
    assert syntax is not None
    found = read(syntax, cut(written(grammar, seed), places))
    assert found.calls and not found.text
    for name, arguments in found.calls:
        assert name == "look"
        value = json.loads(arguments)
        assert isinstance(value, dict)
        jsonschema.validate(value, schema or {})
