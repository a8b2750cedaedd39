"""Rewrites JSON schemas for llguidance: what matches the new one also matches the client's.

Schemas come from clients and may be wrong; what is not understood stays as it is, and llguidance
refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# The formats that llguidance enforces. JSON Schema has no others that must be: an unknown one
# ("password", "path") is an annotation.
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # have schemas as members
_VALUES = ("enum", "const", "default", "examples")
_MAX_REFS = 16  # followed from one to the next
_MAX_OPTIONS = 256  # of a `oneOf` that are compared

Part = dict[str, Any]


def mapped(schema: Any, change: Callable[[Part, Part], Part]) -> Any:
    """A copy with every schema changed, the innermost first.

    Args:
        change: called with a schema's copy, whose members are changed, and with the original.
    """
    if isinstance(schema, list):
        return [mapped(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copied: Part = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            copied[key] = {name: mapped(each, change) for name, each in value.items()}
        else:
            copied[key] = value if key in _VALUES else mapped(value, change)
    return change(copied, schema)


def resolved(part: Any, root: Part) -> Part:
    """The schema that `part` is, or to which its `$ref` leads in `root`; {} if there is none."""
    for _ in range(_MAX_REFS):
        if not isinstance(part, dict):
            return {}
        place = part.get("$ref")
        if not isinstance(place, str):
            return part
        head, *names = place.split("/")
        part = root if head == "#" else None
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
    return {}


def followable(schema: Part) -> Part:
    """A schema without the annotations and forms that llguidance refuses."""
    found: Part = mapped(schema, partial(_followable, root=schema))
    return found


def _followable(part: Part, original: Part, root: Part) -> Part:
    form = part.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del part["format"]
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    options = part.get("oneOf")
    if isinstance(options, list) and "anyOf" not in part:
        property_name = _discriminator(options, root)
        if property_name is not None:
            part["anyOf"] = [_requiring(property_name, each, root) for each in options]
            del part["oneOf"]
    return part


def _discriminator(options: Sequence[Any], root: Part) -> str | None:
    """A property with different constants in all of `options`, which are objects or null.

    No value that has the property can match two of them. None: there is none.
    """
    if len(options) > _MAX_OPTIONS:
        return None
    targets = [resolved(each, root) for each in options]
    objects = [each for each in targets if each.get("type") == "object"]
    others = [each.get("type") for each in targets if each.get("type") != "object"]
    if not objects or others not in ([], ["null"]):
        return None
    constants = [_constants(each, root) for each in objects]
    for name in constants[0]:
        values = [value for each in constants for value in each.get(name, ())]
        if all(name in each for each in constants) and len(set(values)) == len(values):
            return name
    return None


def _constants(part: Part, root: Part) -> dict[str, set[str]]:
    """The possible values, as JSON, of each property that has only some."""
    properties = part.get("properties")
    found: dict[str, set[str]] = {}
    for name, each in properties.items() if isinstance(properties, dict) else ():
        target = resolved(each, root)
        values = [target["const"]] if "const" in target else target.get("enum")
        if isinstance(values, list):
            found[name] = {json.dumps(value, sort_keys=True) for value in values}
    return found


def _requiring(property_name: str, option: Part, root: Part) -> Part:
    """An alternative of `oneOf` that must have the property, since only that excludes the others.

    Pydantic does not require a discriminator that has a default.
    """
    if resolved(option, root).get("type") != "object":
        return option
    required = option.get("required")
    names = required if isinstance(required, list) else []
    return option | {"required": list(dict.fromkeys([*names, property_name]))}
