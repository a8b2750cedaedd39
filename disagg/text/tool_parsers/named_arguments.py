"""Converts arguments that a model writes one by one as text to JSON: Qwen3-Coder, GLM and others.

Such text has no types, so they are taken from the schema of the function. A string is passed on
while it arrives, any other value when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from disagg.text.answer_delta import Sink

MAX_LITERAL_NUM_CHARS = 1 << 16  # longest value that is parsed as a Python literal
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = "\\'\"abfnrtvxuUN\n"
_PYTHON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class NamedArguments:
    """Writes the arguments of one call.

    Args:
        schema: schema of the function's parameters; None if unknown.
    """

    def __init__(self, sink: Sink, schema: Mapping[str, Any] | None) -> None:
        self._sink = sink
        properties = (schema or {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._is_closed = (schema or {}).get("additionalProperties") is False
        self._is_empty = True
        self._types: frozenset[str] = frozenset()
        self._value: list[str] | None = None  # pieces of a value; None if it is a string

    def begin(self, name: str, *, is_text: bool | None = None) -> None:
        """Begin an argument.

        Args:
            is_text: whether the value is a string; None if the schema decides.
        """
        self._sink.arguments(("{" if self._is_empty else ", ") + _to_json(name) + ": ")
        self._is_empty = False
        self._sink.closing = ""  # an answer that ends inside a value stays as it is
        self._types = types_of(self._properties.get(name))
        if is_text or (is_text is None and self._types == {"string"}):
            self._value = None
            self._sink.arguments('"')
        else:
            self._value = []

    def add(self, piece: str) -> None:
        """Add a piece of the argument's text."""
        if self._value is None:
            self._sink.arguments(_to_json(piece)[1:-1])
        else:
            self._value.append(piece)

    def end(self) -> None:
        if self._value is None:
            self._sink.arguments('"')
        else:
            self._sink.arguments(json_of("".join(self._value), self._types))
        self._sink.closing = "}"

    def may_be(self, name: str) -> bool:
        """Whether the function may have an argument with this name."""
        return name in self._properties or not self._properties

    def may_follow(self, name: str) -> bool:
        """Whether an argument with this name may follow the one that has begun.

        If not, its tag is part of the text. A model may make up an argument, unless the schema
        allows no others.
        """
        return name in self._properties or not self._is_closed or self._value is not None


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not restrict them.

    The schema may be invalid, because without a grammar nothing checks it.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    found = {each for each in types if isinstance(each, str)}
    for branch in ("anyOf", "oneOf"):
        options = schema.get(branch)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option)
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found = {_TYPE_NAMES.get(type(value), "") for value in values}
    return frozenset(found)


_TYPE_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    dict: "object", list: "array",
}  # fmt: skip


def json_of(text: str, types: frozenset[str] = frozenset()) -> str:
    """Convert a value that is JSON or a Python literal to JSON; anything else becomes a string.

    Args:
        types: the allowed types. If a string is allowed, the value is one, unless it is null and
            that is allowed too.
    """
    value = text.strip()
    if "string" in types and not (value.lower() in ("null", "none") and "null" in types):
        return _to_json(text)
    try:
        json.loads(value, parse_constant=_refuse_constant)
        return value
    except (ValueError, RecursionError):
        pass
    if value.lower() in _PYTHON_WORDS:
        return _PYTHON_WORDS[value.lower()]
    return literal_to_json(value) or _to_json(text)


def literal_to_json(source: str) -> str | None:
    """Convert a Python literal to JSON; None if it is not one or has an unpaired surrogate."""
    if len(source) > MAX_LITERAL_NUM_CHARS:
        return None
    try:
        value = ast.literal_eval(_ESCAPE.sub(_kept_escape, source))
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _kept_escape(found: re.Match[str]) -> str:
    """A valid escape, or an escaped backslash, because Python warns of invalid escapes."""
    return found[0] if found[1] in _ESCAPED else "\\" + found[0]


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
