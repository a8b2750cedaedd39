"""Makes JSON of arguments that a model writes one by one, as text: Qwen3-Coder, GLM and others.

Such text has no types, so they are taken from the schema of the function. A string is passed on as
it arrives; any other value when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from disagg.text.answer_delta import Sink

MAX_LITERAL_NUM_CHARS = 1 << 16  # of a value that is no JSON but may be Python's way to write it
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = "\\'\"abfnrtvxuUN\n"
_PYTHON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class NamedArguments:
    """Writes the arguments of one call.

    Args:
        schema: of the function's parameters; None: it is not known.
    """

    def __init__(self, sink: Sink, schema: Mapping[str, Any] | None) -> None:
        self._sink = sink
        properties = (schema or {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._is_empty = True
        self._types: frozenset[str] = frozenset()
        self._value: list[str] | None = None  # of an argument that is no text; None: it is text

    def begin(self, name: str, *, is_text: bool | None = None) -> None:
        """An argument.

        Args:
            is_text: as the model says; None: as the schema says.
        """
        self._sink.arguments(("{" if self._is_empty else ", ") + _to_json(name) + ": ")
        self._is_empty = False
        self._types = types_of(self._properties.get(name))
        if is_text or (is_text is None and self._types == {"string"}):
            self._value = None
            self._sink.arguments('"')
        else:
            self._value = []

    def add(self, piece: str) -> None:
        """More of the argument's text."""
        if self._value is None:
            self._sink.arguments(_to_json(piece)[1:-1])
        else:
            self._value.append(piece)

    def end(self) -> None:
        if self._value is None:
            self._sink.arguments('"')
        else:
            self._sink.arguments(json_of("".join(self._value), self._types))

    def close(self) -> None:
        """All arguments are there."""
        if not self._is_empty:
            self._sink.arguments("}")
        self._sink.end_call()


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty: it does not say.

    Nobody has checked the schema: without a grammar it is only shown to the model.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    said = schema.get("type")
    found = {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)}
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
    """A value as JSON, from JSON or from Python's way to write it; what is neither is a text.

    Args:
        types: where a text is allowed, it is one, unless it says null and that is allowed as well.
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
    """A Python literal as JSON; None: it is none, or has half of a surrogate pair in it."""
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
    """An escape that Python has, or else a backslash: Python would warn."""
    return found[0] if found[1] in _ESCAPED else "\\" + found[0]


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
