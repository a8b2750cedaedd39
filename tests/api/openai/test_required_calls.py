"""Whatever schema a function has, a call that is required is a call of it with an object."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.api.openai.tools import (
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    required_calls,
)
from disagg.messages import Grammar
from disagg.text.answer_reader import AnswerSyntax, read_arguments_of
from disagg.text.tool_parsers.json_calls import read_llama3_json
from tests.text.answers import cut, read

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
@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 20), places=st.lists(st.integers(0, 200)))
def test_arguments_are_an_object(
    is_named: bool, schema: dict[str, Any] | None, seed: int, places: list[int]
) -> None:
    tool = Tool("function", FunctionDefinition("look", parameters=schema))
    choice: ToolChoice = NamedTool("function", NamedFunction("look")) if is_named else "required"
    request = SimpleNamespace(tools=[tool], tool_choice=choice, parallel_tool_calls=None)
    grammar = required_calls(request)
    assert grammar is not None
    reader = read_arguments_of("look") if is_named else read_llama3_json
    found = read(
        AnswerSyntax(read_calls=reader, tools={"look": schema or {}}),
        cut(written(grammar, seed), places),
    )
    assert found.calls and not found.text
    for name, arguments in found.calls:
        assert name == "look"
        value = json.loads(arguments)
        assert isinstance(value, dict)
        jsonschema.validate(value, schema or {})
