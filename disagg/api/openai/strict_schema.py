"""Makes the schema of a request strict, unless the client sets `strict: false`.

Objects may have only the properties that the schema names, and integers at most 18 digits.
Otherwise a weak model may generate more properties or digits until its tokens are used up. An
answer by the stricter schema is also valid by the client's. Strings, lists and fractions without
bounds get none: a text that was cut by one would look complete.
"""

from __future__ import annotations

from typing import Any

LARGEST = 10**18  # a float has it exactly, which llguidance wants of a bound

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # their members are schemas
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum",
           "const")  # fmt: skip
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of `schema` with what it leaves open closed, where that is plain.

    Parts of an `allOf` each have some members of one object, so nothing is closed beside one.
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
