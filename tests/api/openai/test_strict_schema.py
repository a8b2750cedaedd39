"""What `strict` closes, and what it leaves as the client wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.api.openai import structured_output
from disagg.api.openai.structured_output import LARGEST, make_strict
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.json_schema import resolved
from disagg.messages import Grammar
from tests.api.fakes import END, TOKENIZER
from tests.api.openai.test_structured_output import form, sampling
from tests.contract.contract import CHAT

OPEN: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
BOUNDS = {"minimum": -LARGEST, "maximum": LARGEST}
CLOSED = {
    "type": "object",
    "properties": {"n": {"type": "integer", **BOUNDS}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"$defs": {"a": OPEN}}, {"$defs": {"a": CLOSED}}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"type": ["integer", "null"]}, {"type": ["integer", "null"], **BOUNDS}),
        ({"type": "object", "properties": {"enum": OPEN}},
         {"type": "object", "properties": {"enum": CLOSED}, "additionalProperties": False}),
    ],
)  # fmt: skip
def test_what_is_left_open_is_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert make_strict(schema) == expected
    assert json.dumps(schema) == before, "the client's own is not changed"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},  # any object, which is what it says
        OPEN | {"additionalProperties": {"type": "string"}, "properties": {}},
        {"type": "object", "properties": {}, "patternProperties": {"^a": {"type": "string"}}},
        {"type": "integer", "maximum": 7},
        {"enum": [{"type": "integer"}]},
        {"const": {"type": "object", "properties": {}}},
        {
            "allOf": [
                {"type": "object", "properties": {}, "patternProperties": {}},
                {"type": "object", "properties": {}},
            ]
        },
        {"type": "string"},
    ],
)
def test_what_says_it_itself_stays(schema: Any) -> None:
    assert make_strict(schema) == schema


def test_long_integers_can_be_written_and_endless_ones_cannot() -> None:
    grammars = Grammars(TOKENIZER.core.to_str, [END])
    compiled = grammars.compile(Grammar("json", json.dumps(make_strict(OPEN)))).result()
    for number, fits in ((LARGEST, True), (-LARGEST, True), (LARGEST + 1, False), (10**30, False)):
        token_ids = TOKENIZER.encode(f'{{"n":{number}}}', add_special_tokens=False)
        matcher = compiled.matcher()
        assert matcher.consume_tokens(token_ids) is fits, number


A_AND_B: dict[str, Any] = {
    "allOf": [{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"b": {"type": "null"}}}],
    "$defs": {"A": {"type": "object", "properties": {"a": {"type": "null"}}}},
}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not_fit"),
    [
        (A_AND_B, '{"a":null,"b":null}', '{"c":null}'),
        ({"allOf": [{"allOf": [A_AND_B["allOf"][0]]}, A_AND_B["allOf"][1]],
          "$defs": A_AND_B["$defs"]}, '{"a":null,"b":null}', '{"a":null,"c":null}'),
        ({"properties": {"c": {"type": "null"}}} | A_AND_B, '{"c":null,"a":null}', '{"d":null}'),
        ({"$ref": "#/$defs/A", "properties": {"c": {"type": "null"}}, "$defs": A_AND_B["$defs"]},
         '{"a":null,"c":null}', '{"d":null}'),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
          "anyOf": [{"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]},
         '{"a":null,"b":null}', '{"a":null,"b":null,"c":null}'),
        ({"anyOf": [A_AND_B["$defs"]["A"], A_AND_B["allOf"][1]]}, '{"a":null}', '{"a":null,"b"'),
        ({"allOf": [OPEN], "description": "of old pydantic"}, '{"n":1}', '{"x":1}'),
        ({"allOf": [A_AND_B["allOf"][0], {"required": ["a"]}], "$defs": A_AND_B["$defs"]},
         '{"a":null}', '{"a":null,"x":1}'),
    ],
)  # fmt: skip
def test_objects_of_several_schemas_are_closed_with_all_their_properties(
    schema: dict[str, Any], fits: str, does_not_fit: str
) -> None:
    grammars = Grammars(TOKENIZER.core.to_str, [END])
    compiled = grammars.compile(Grammar("json", json.dumps(make_strict(schema)))).result()
    for text, is_taken in ((fits, True), (does_not_fit, False)):
        token_ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert compiled.matcher().consume_tokens(token_ids) is is_taken, text


def test_work_grows_no_faster_than_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part leads to all that follow, of which a limited number is looked at."""
    num_looks = 0

    def looked(part: Any, root: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return resolved(part, root)

    monkeypatch.setattr(structured_output, "resolved", looked)
    seen = []
    for size in (40, 80, 120):  # more than are looked at from one part
        chain = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 9} for i in range(size)}
        num_looks = 0
        make_strict({"$ref": "#/$defs/0", "properties": {}, "$defs": chain})
        seen.append(num_looks)
    assert seen[2] - seen[1] == seen[1] - seen[0] > 0


async def test_schemas_are_closed_unless_clients_want_them_open() -> None:
    for is_strict, expected in ((True, CLOSED), (None, CLOSED), (False, OPEN)):
        (params,) = await sampling("/v1/chat/completions", CHAT, form(OPEN, strict=is_strict))
        assert params.grammar is not None
        assert json.loads(params.grammar.source) == expected
