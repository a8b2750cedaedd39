"""Makes the schema of a request strict, unless the client sets `strict: false`.

Objects may then have only the properties that the schema names, and integers at most 18 digits.
Otherwise a weak model may generate properties or digits until its tokens are used up. An answer
that is valid for the strict schema is also valid for the client's. Strings, lists and fractions get
no limits: a string that is cut at a limit would look complete.
"""

from __future__ import annotations

from typing import Any

LARGEST = 10**18  # llguidance needs bounds that a float represents exactly

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # have schemas as members
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum",
           "const")  # fmt: skip
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A strict copy of `schema`.

    Objects stay open if the schema has an `allOf`, because each of its parts names only some of the
    properties of an object.
    """
    closed: dict[str, Any] = _strict(schema, can_close=not _has_key(schema, "allOf"))
    return closed


def _strict(schema: Any, *, can_close: bool) -> Any:
    if isinstance(schema, list):
        return [_strict(each, can_close=can_close) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _strict(each, can_close=can_close) for name, each in value.items()}
        elif key in ("enum", "const", "default", "examples"):
            found[key] = value
        else:
            found[key] = _strict(value, can_close=can_close)
    has_members = "object" in kinds and isinstance(schema.get("properties"), dict)
    if can_close and has_members and not any(key in schema for key in _OPEN):
        found["additionalProperties"] = False
    if "integer" in kinds and not any(key in schema for key in _BOUNDS):
        found |= {"minimum": -LARGEST, "maximum": LARGEST}
    return found


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_has_key(each, key) for each in value.values())
    return isinstance(value, list) and any(_has_key(each, key) for each in value)
