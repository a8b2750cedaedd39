"""Schemas that llguidance refuses as clients write them, and follows as they are rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.json_schema import FORMATS, followable
from disagg.errors import GrammarError
from disagg.messages import Grammar
from disagg.text.tokenizer import Tokenizer

TEXT = (Path(disagg.__file__).parent / "assets" / "demo-small" / "tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_json(TEXT, "demo-small")
GRAMMARS = Grammars(lambda: TEXT, (0,))
NULL = {"type": "null"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "additionalProperties": False}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "age": NULL},
       "additionalProperties": False}  # fmt: skip
REFS: list[Any] = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
DEFS = {"Cat": CAT, "Dog": DOG}


def takes(schema: dict[str, Any], text: str) -> bool:
    compiled = GRAMMARS.compile(Grammar("json", json.dumps(schema))).result()
    matcher = compiled.matcher()
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.consume_tokens(token_ids) and matcher.is_accepting()


def test_formats_that_are_unknown_are_annotations() -> None:
    for name in ("password", "binary", "byte", "path", "url", "regex", "", "int32", "x/y"):
        for bound in ({}, {"maxLength": 2}):
            schema = {"type": "string", "format": name, **bound}
            assert takes(schema, '"ab"')
            assert takes(schema, '"abc"') is not bool(bound)
    assert takes({"properties": {"format": {"type": "null"}}}, '{"format":null}')
    assert takes({"enum": [{"format": "path"}]}, '{"format":"path"}')


def test_formats_that_are_known_are_enforced() -> None:
    for name in FORMATS:
        assert not takes({"type": "string", "format": name}, '"@ @"')


def test_unique_items_are_refused_only_if_they_are_asked_for() -> None:
    assert takes({"type": "array", "uniqueItems": False}, "[1,1]")
    with pytest.raises(GrammarError, match="uniqueItems"):
        takes({"type": "array", "uniqueItems": True}, "[]")


@pytest.mark.parametrize("options", [REFS, [CAT, DOG], [*REFS, NULL], [CAT, REFS[1]]])
def test_alternatives_that_exclude_each_other_are_followed(options: list[Any]) -> None:
    plain: dict[str, Any] = {"oneOf": options, "$defs": DEFS}
    for schema in (plain, plain | {"discriminator": {"propertyName": "kind"}}):
        assert takes(schema, '{"kind":"cat"}')
        assert takes(schema, '{"kind":"wolf","age":null}')
        assert not takes(schema, '{"kind":"cat","age":null}')
        assert not takes(schema, "{}"), "both alternatives would match"
        assert takes(schema, "null") is (NULL in options)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [REFS[0], REFS[0]], "$defs": DEFS},
        {"oneOf": [REFS[0], {"type": "object"}], "$defs": DEFS},
    ],
)
def test_other_alternatives_are_refused_in_words(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="oneOf is supported only if") as refused:
        takes(schema, "{}")
    assert "coerce" not in refused.value.message


def test_schemas_that_are_wrong_stay_as_they_are() -> None:
    for schema in (
        {"oneOf": 5},
        {"oneOf": [5]},
        {"oneOf": [{"$ref": 5}, {"$ref": "#/nowhere/0"}]},
        {"oneOf": [{"$ref": "#/oneOf/0"}], "format": 5},
        {"$ref": "#", "oneOf": [{"$ref": "#"}]},
        {"properties": 5, "oneOf": [{"type": "object", "properties": 5}]},
    ):
        assert followable(schema) == schema


def test_patterns_that_exclude_each_other_are_refused_in_words() -> None:
    with pytest.raises(GrammarError, match=r"patternProperty regexes /.a/ and /.ab/ are not"):
        takes({"type": "object", "patternProperties": {"^a": NULL, "^ab": CAT}}, "{}")
