"""Makes the schema of a request strict, unless the client sets `strict: false`.

Objects may then have only the properties that the schema names, and integers at most 18 digits.
Otherwise a weak model may generate properties or digits until its tokens are used up. An answer
that is valid for the strict schema is also valid for the client's. Strings, lists and fractions get
no limits: a string that is cut at a limit would look complete.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

from disagg.engine.sched.json_schema import Part, mapped, resolved

LARGEST = 10**18  # llguidance needs bounds that a float represents exactly

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum",
           "const")  # fmt: skip
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_MAX_PARTS = 32  # of one object; more are left open


def strict(schema: Part) -> Part:
    """A strict copy of `schema`.

    If an object must match several schemas, each names only some of its properties. So those stay
    open, and the whole is closed with the properties of all.
    """
    open_ids: set[int] = set()

    def note(copied: Part, original: Part) -> Part:
        open_ids.update(map(id, _joined(original, schema)))
        return copied

    mapped(schema, note)
    closed: Part = mapped(schema, partial(_strict, root=schema, open_ids=open_ids))
    return closed


def _strict(part: Part, original: Part, root: Part, open_ids: Container[int]) -> Part:
    if id(original) not in open_ids:
        names = _property_names(original, root)
        if names is not None:
            own = part.get("properties", {})
            part["properties"] = own | {name: True for name in names if name not in own}
            part["additionalProperties"] = False
    if "integer" in _kinds(original) and not any(key in original for key in _BOUNDS):
        part |= {"minimum": -LARGEST, "maximum": LARGEST}
    return part


def _property_names(part: Part, root: Part) -> list[str] | None:
    """The properties of an object that may be closed; None if it may not, or is no object."""
    parts = [part, *_joined(part, root)]
    named = [each["properties"] for each in parts if _has_members(each)]
    is_object = any("object" in _kinds(each) for each in parts)
    if not named or not is_object or len(parts) > _MAX_PARTS:
        return None
    if any(key in each for each in parts for key in _OPEN):
        return None
    return [name for properties in named for name in properties]


def _joined(part: Part, root: Part) -> list[Part]:
    """The further schemas that an object of `part` must match, if several name its properties.

    Alternatives count only beside properties of the whole; otherwise each is closed by itself.
    """
    found = _reached(part, root, ["allOf"])
    if any(map(_has_members, [part, *found])):
        found = _reached(part, root, ["allOf", "anyOf", "oneOf"])
    return found if sum(map(_has_members, [part, *found])) > 1 else []


def _reached(part: Part, root: Part, keys: Sequence[str]) -> list[Part]:
    """The schemas to which `$ref` and the lists at `keys` lead, from one to the next."""
    parts: dict[int, Part] = {}
    waiting = [part]
    while waiting and len(parts) <= _MAX_PARTS:
        each = waiting.pop()
        lists = [each[key][:_MAX_PARTS] for key in keys if isinstance(each.get(key), list)]
        further = [one for listed in lists for one in listed if isinstance(one, dict)]
        for one in [*further, resolved(each, root)]:
            if id(one) not in parts and one is not part:
                parts[id(one)] = one
                waiting.append(one)
    return list(parts.values())


def _has_members(part: Part) -> bool:
    return isinstance(part.get("properties"), dict)


def _kinds(part: Part) -> list[Any]:
    kinds = part.get("type")
    return kinds if isinstance(kinds, list) else [kinds]
