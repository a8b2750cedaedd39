"""The pages of docs/reference, which are made from the code.

    python -m tests.reference_pages       # writes them; tests/test_docs.py compares

Flags come from the parsers, settings from `config`, fields from the structs that parse requests,
metrics from a fleet that serves, routes and error codes from the data by which `tests/contract`
tests them, and what has no text in the code from reference_pages.yaml.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from msgspec import Struct
from msgspec.inspect import DictType, FloatType, IntType, Type, VarTupleType
from prometheus_client.parser import text_string_to_metric_families

from disagg import local
from disagg.api import apis
from disagg.api.http import metrics
from disagg.app import autoscaling
from disagg.cli.main import VERBS
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.ingress import fleet_metrics
from disagg.settings import Setting, settings_of
from tests.api.apps import app_with_files
from tests.contract.contract import codes, routes
from tests.test_local import ENGINE
from tests.tiny_model import tiny_parts, write_tiny_model

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "docs" / "reference"

_SIGNS = {
    "minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<",
    "minLength": "length ≥", "maxLength": "length ≤", "minItems": "length ≥",
    "maxItems": "length ≤", "maxProperties": "entries ≤",
}  # fmt: skip
_NO_LIMIT = 2**31 - 1  # what an integer of the messages between processes can be
TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    made: dict[str, Callable[[], str]] = {
        "configuration.md": configuration,
        "environment.md": environment,
        "errors.md": errors,
        "flags.md": flags,
        "http.md": http,
        "metrics.md": metrics_page,
        "spans.md": spans,
    }
    return {name: make().rstrip("\n") + "\n" for name, make in made.items()}


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    num = head.count("|") - 1
    lines = [head, "|" + "---|" * num]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# Configuration


def configuration() -> str:
    parts = ["# Configuration\n", TEXTS["configuration"]]
    structs: list[type[Struct]] = [ServeConfig]
    for struct in structs:
        settings = settings_of(struct).values()
        structs += [each.section for each in settings if each.section not in (None, *structs)]  # type: ignore[misc]
        about = " ".join((struct.__doc__ or "").split("\n\n")[0].split())
        rows = (
            (f"`{each.name}`", _type(each), _default(each), _cell(_linked(each.description)))
            for each in settings
        )
        parts.append(f"## {struct.__name__}\n\n{about}\n")
        parts.append(_table("| setting | type | default | |", rows))
    return "\n".join(parts)


def _linked(text: str) -> str:
    """Pages of docs/ that texts of the code name, as links of this folder."""
    return re.sub(r"docs/([\w/-]+)\.md(#[\w-]+)?", r"[\1](../\1.md\2)", text)


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


# Commands


def flags() -> str:
    parts = ["# Commands and flags\n\nWhat `disagg COMMAND --help` prints.\n"]
    for verb in VERBS:
        module = importlib.import_module(VERBS[verb])
        parser = argparse.ArgumentParser(prog=f"disagg {verb}")
        module.add_arguments(parser)
        parts.append(f"## disagg {verb}\n\n{_cell((module.__doc__ or '').splitlines()[0])}\n")
        parts += _flags_of(parser)
    return "\n".join(parts)


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = []
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction):
            for name, action in each.choices.items():
                yield f"### {parser.prog} {name}\n"
                yield from _flags_of(action)
        elif each.help != argparse.SUPPRESS and "-h" not in each.option_strings:
            names = ", ".join(f"`{name}`" for name in each.option_strings) or f"`{each.dest}`"
            text = (each.help or "") % {**vars(each), "prog": parser.prog}
            rows.append((names, _cell(_linked(text))))
    if rows:
        yield _table("| flag | |", rows)


# Environment, errors, HTTP


def environment() -> str:
    named = _names_in_sources(r'"(DISAGG_[A-Z_]+)"') - {*TEXTS["internal"]}
    assert named == {*TEXTS["environment"]}, named ^ {*TEXTS["environment"]}
    return (
        f"# Environment\n\n{TEXTS['environment_intro']}\n"
        f"{_named('| variable | |', 'environment')}\n"
        f"## Of other programs\n\n{_named('| variable | |', 'environment_of_others')}"
    )


def errors() -> str:
    parts = ["# Errors", TEXTS["errors"]]
    for code, of in codes().items():
        parts += [
            f"## {code}",
            f"{of['status']}: {of['means']}.",
            *([of["do"]] if "do" in of else []),
        ]
    return "\n\n".join(part.strip() for part in parts if part)


def http() -> str:
    rows = (
        (
            f"`{of['method']} {path}`",
            "" if of["who"] == "everybody" else "yes",
            of["means"],
        )
        for path, of in routes().items()
    )
    parts = [
        "# HTTP\n",
        TEXTS["http"],
        _table("| path | needs a key | |", rows),
    ]
    paths = app_with_files(Path("files")).routes.values()
    schemas = json.loads(apis.openapi(paths))["components"]["schemas"]
    of_body = {
        body.__name__: route.path
        for route in paths
        for body in route.methods.values()
        if body is not None
    }
    for name, schema in schemas.items():
        title = f"POST {of_body[name]}" if name in of_body else name
        fields = _fields(schema, {each: _anchor(of_body.get(each, each)) for each in schemas})
        parts.append(f"## {title}\n\n{_table('| field | type |', fields)}")
    return "\n".join(parts)


def _anchor(name: str) -> str:
    return ("#post-" if name.startswith("/") else "#") + re.sub(r"[^\w-]", "", name.lower())


def _fields(schema: dict[str, Any], links: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, kind in schema.get("properties", {}).items():
        star = ", required" if name in schema.get("required", ()) else ""
        yield f"`{name}`", _json_type(kind, links) + star


def _json_type(kind: dict[str, Any], links: dict[str, str]) -> str:
    """A JSON schema in words; null, which every optional field takes, is left out."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}]({links[name]})"
    if "anyOf" in kind:
        return " or ".join(
            _json_type(each, links) for each in kind["anyOf"] if each != {"type": "null"}
        )
    if "enum" in kind or "const" in kind:
        return ", ".join(f"`{value}`" for value in kind.get("enum", [kind.get("const")]))
    kind_name = str(kind.get("type", "any"))
    name = {"string": "text", "array": "list"}.get(kind_name, kind_name)
    if kind.get("items"):
        name += f" of {_json_type(kind['items'], links)}"
    limits = ((sign, kind.get(key, _NO_LIMIT)) for key, sign in _SIGNS.items())
    return name + "".join(f" {sign} {limit:,g}" for sign, limit in limits if abs(limit) < _NO_LIMIT)


# Metrics and spans


def metrics_page() -> str:
    """What a fleet exports that has served one request, with the labels that the code declares."""
    labels = {row_name.replace(".", "_"): row.labels for row_name, row in metrics.TABLE.items()}
    declared = map(fleet_metrics._declared_metric, fleet_metrics.FIELDS)
    labels |= {name: row.labels for name, row in (*fleet_metrics.TABLE.items(), *declared)}
    labels["inter_token_latency_seconds"] = ("model_name",)
    rows = []
    for family in text_string_to_metric_families(asyncio.run(_exported())):
        name = family.name.removeprefix("disagg_")
        own = labels.get(name) or labels.get(name.removesuffix("_seconds"), ())
        suffix = "_total" if family.type == "counter" else ""
        rows.append(
            (f"`{family.name}{suffix}`", family.type, ", ".join(own), _cell(family.documentation))
        )
    head = "| metric | type | labels | |"
    of_ray = (
        (f"`disagg_pool_{name}`", "gauge", "model_name, role", text)
        for name, text in autoscaling._TEXTS.items()
    )
    return (
        f"# Metrics\n\n{TEXTS['metrics']}\n"
        + _table(head, sorted(rows))
        + "\n## Autoscaled pools\n\nThe Ray of a cluster exports these, with its own metrics;"
        + " that of `disagg serve` exports none.\n\n"
        + _table(head, of_ray)
    )


async def _exported() -> str:
    with tempfile.TemporaryDirectory() as place:
        tier = TierConfig(
            model=str(write_tiny_model(Path(place) / "tiny")),
            engine=ENGINE,
            prefill=PoolConfig(num_replicas=1),
            decode=PoolConfig(num_replicas=1),
        )
        config = ServeConfig(tiers=(tier,), transport="local", cluster_key="key")
        async with local.running(config, tiny_parts()) as running:
            app = httpx.ASGITransport(running.ingress.app)
            async with httpx.AsyncClient(transport=app, base_url="http://local") as client:
                return str((await client.get("/metrics")).text)


def spans() -> str:
    named = _names_in_sources(r'"(disagg\.[a-z_.]+)"') - {*TEXTS["no_attributes"]}
    named -= {name for name in named if [*ROOT.glob(name.replace(".", "/") + "*")]}  # modules
    assert named == {*TEXTS["attributes"]}, named ^ {*TEXTS["attributes"]}
    return (
        f"# Spans\n\n{_named('| span | time spent |', 'spans')}\n"
        f"## Attributes\n\n{TEXTS['attributes_intro']}\n"
        f"{_named('| attribute | |', 'attributes')}"
    )


def _names_in_sources(pattern: str) -> set[str]:
    sources = [*(ROOT / "disagg").rglob("*.py"), ROOT / "setup.py"]
    return {name for path in sources for name in re.findall(pattern, path.read_text())}


def _named(head: str, section: str) -> str:
    """A table of a section of reference_pages.yaml; several names of a row are set apart."""
    rows = ((f"`{names}`".replace(", ", "`, `"), text) for names, text in TEXTS[section].items())
    return _table(head, rows)


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PLACE / name).write_text(text)
