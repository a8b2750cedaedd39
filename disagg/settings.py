"""What the settings of `config` are, for `--help`, errors and the page docs/settings.md.

python -m disagg.settings > docs/settings.md
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec.inspect import (
    DictType,
    Field,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from disagg.config import ServeConfig

HEADER = """# Settings

The settings of a deployment, for YAML files (`disagg serve --config`, `serve deploy`); the flags
of `disagg serve` are named after them, and [deploying.md](deploying.md) shows whole files. This
page is made from `disagg/config.py`: `python -m disagg.settings > docs/settings.md`.
"""


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


def page() -> str:
    """The page of all settings, with a table for each section."""
    parts = [HEADER]
    structs: list[type[msgspec.Struct]] = [ServeConfig]
    for struct in structs:
        settings = settings_of(struct).values()
        for each in settings:
            if each.section is not None and each.section not in structs:
                structs.append(each.section)
        about = " ".join((struct.__doc__ or "").split("\n\n")[0].split())
        parts += [f"## {struct.__name__}", "", about, ""]
        parts += ["| setting | type | default | |", "|---|---|---|---|"]
        parts += [
            f"| `{each.name}` | {_type(each)} | {_default(each)} | {_cell(each.description)} |"
            for each in settings
        ]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _default(setting: Setting) -> str:
    return "required" if setting.is_required else _cell(setting.shown_default)


def _type(setting: Setting) -> str:
    if setting.section is not None:
        name = setting.section.__name__
        many = {VarTupleType: "list of ", DictType: "mapping of names to "}
        return f"{many.get(type(setting.kind), '')}[{name}](#{name.lower()})"
    if setting.values:
        return ", ".join(map(str, setting.values))
    name = type(setting.kind).__name__.removesuffix("Type").lower()
    return {"vartuple": "list", "dict": "mapping", "str": "text"}.get(name, name) + "".join(
        f" {sign} {limit:g}" for sign, limit in _limits(setting.kind)
    )


def _limits(found: Type) -> Iterator[tuple[str, float]]:
    if isinstance(found, IntType | FloatType):
        for sign, limit in ((">", found.gt), ("≥", found.ge), ("<", found.lt), ("≤", found.le)):
            if limit is not None:
                yield sign, limit


if __name__ == "__main__":
    sys.stdout.write(page())
