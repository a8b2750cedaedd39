"""What the settings of `config` are, for `--help`, errors and docs/reference/configuration.md."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec.inspect import (
    DictType,
    Field,
    LiteralType,
    NoneType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from disagg.config import ServeConfig


class Setting(NamedTuple):
    """One setting. `kind` is its type without None, and `default` None also where there is none."""

    name: str
    kind: Type
    default: Any
    is_required: bool
    description: str

    @property
    def values(self) -> tuple[Any, ...]:
        """The values that are possible, if they are few."""
        return tuple(self.kind.values) if isinstance(self.kind, LiteralType) else ()

    @property
    def section(self) -> type[msgspec.Struct] | None:
        """The struct of its own settings, or of those of each of its entries."""
        inner = self.kind
        if isinstance(inner, VarTupleType):
            inner = inner.item_type
        elif isinstance(inner, DictType):
            inner = inner.value_type
        return inner.cls if isinstance(inner, StructType) else None

    @property
    def shown_default(self) -> str:
        """The default as people write it; "" where there is none, or where it is a section."""
        if isinstance(self.default, bool):
            return "enabled" if self.default else ""
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default) if isinstance(self.default, int | str) else ""

    @property
    def help(self) -> str:
        """The description with the default, unless it says itself what holds without a value."""
        if "(default" in self.description or not self.shown_default:
            return self.description
        return f"{self.description} (default: {self.shown_default})"


@functools.cache
def settings_of(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings of a struct by name, each with the text that stands below it in the source."""
    (source,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(source, ast.ClassDef)
    texts = {}
    for field, text in itertools.pairwise(source.body):
        match field, text:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                texts[name] = " ".join(words.split())
    info = type_info(struct)
    assert isinstance(info, StructType)
    return {field.name: _setting(field, texts[field.name]) for field in info.fields}


def _setting(field: Field, description: str) -> Setting:
    found = field.type
    if isinstance(found, UnionType):
        found = next(each for each in found.types if not isinstance(each, NoneType))
    default = None if field.default is msgspec.NODEFAULT else field.default
    return Setting(field.name, found, default, field.required, description)


def setting_at(path: str) -> Setting | None:
    """The setting at a path in a deployment, such as `tiers[0].engine.dtype`."""
    struct: type[msgspec.Struct] | None = ServeConfig
    setting = None
    for name in re.findall(r"[a-z]\w*", path):
        setting = settings_of(struct).get(name) if struct is not None else None
        struct = setting.section if setting is not None else None
    return setting


def all_paths(struct: type[msgspec.Struct] = ServeConfig, before: str = "") -> Iterator[str]:
    """The paths of all settings, such as `tiers[].engine.dtype`."""
    for name, setting in settings_of(struct).items():
        yield before + name
        if setting.section is not None:
            marks = {VarTupleType: "[]", DictType: ".*"}
            yield from all_paths(
                setting.section, f"{before}{name}{marks.get(type(setting.kind), '')}."
            )


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, with the description of each setting."""
    schema = msgspec.json.schema(ServeConfig)
    structs: list[type[msgspec.Struct]] = [ServeConfig]
    for struct in structs:
        of_struct = schema["$defs"][struct.__name__]
        of_struct["description"] = " ".join((struct.__doc__ or "").split("\n\n")[0].split())
        for name, setting in settings_of(struct).items():
            of_struct["properties"][name]["description"] = setting.description
            if setting.section is not None and setting.section not in structs:
                structs.append(setting.section)
    return schema
