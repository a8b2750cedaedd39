"""Show, validate or describe the configuration of `disagg serve`.

A file (--config) is replaced by environment variables (DISAGG_PORT for --port), and these by flags.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys

import msgspec
from rich.markup import escape

from disagg.cli.serve_arguments import add_arguments as add_serve_arguments
from disagg.cli.serve_arguments import variable_of
from disagg.cli.serve_config import Layers, flags_of_serve, layers_of, settings_in
from disagg.errors import StartupError
from disagg.settings import json_schema
from disagg.tools.terminal import console, print_json, table

SECRETS = {"cluster_key", "api_key", "api_keys", "metrics_key", "redis_url"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = verbs.add_parser(
        "show", help="what `disagg serve` would use with these flags, and where it was set"
    )
    add_serve_arguments(show)
    show.add_argument("--all", action="store_true", help="also show defaults")
    validate = verbs.add_parser("validate", help="check files; exit with 1 if one is not valid")
    validate.add_argument("files", nargs="+", metavar="FILE")
    for each in (show, validate):
        each.add_argument("--json", action="store_true", help="print JSON")
    verbs.add_parser("schema", help="print the JSON schema of a file, for editors")


def run(args: argparse.Namespace) -> int:
    if args.action == "schema":
        print_json(json_schema())
        return 0
    for sentence in misspelt(dict(os.environ)):
        print(f"disagg: {sentence}", file=sys.stderr)
    if args.action == "validate":
        return _validate(args.files, args.json)
    _show(layers_of(args), args.all, args.json)
    return 0


def _show(layers: Layers, with_defaults: bool, as_json: bool) -> None:
    """Raises `StartupError` if the configuration is not valid."""
    rows = []
    for path, value in settings_in(msgspec.to_builtins(layers.config())):
        is_set = any(path == each or path.startswith(f"{each}.") for each, _ in
                     settings_in(layers.raw))  # fmt: skip
        if is_set or with_defaults:
            is_secret = value is not None and bool(SECRETS & set(path.split(".")))
            origin = layers.origin(path) or ("" if is_set else "default")
            rows.append((path, "(secret)" if is_secret else value, origin))
    if as_json:
        print_json({path: {"value": value, "from": origin} for path, value, origin in rows})
        return
    shown = table("<setting", "<value", "<from")
    for path, value, origin in rows:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        shown.add_row(escape(path), escape(text), escape(origin))
    console().print(shown)


def _validate(files: list[str], as_json: bool) -> int:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    found: dict[str, str] = {}
    for file in files:
        try:
            layers_of(parser.parse_args(["--config", file])).config()
            found[file] = ""
        except StartupError as error:
            found[file] = error.message
    if as_json:
        print_json({file: {"valid": not text, "error": text} for file, text in found.items()})
    else:
        for file, text in found.items():
            print(text if text.startswith(file) else f"{file}: {text or 'valid'}")
    return int(any(found.values()))


def misspelt(environment: dict[str, str]) -> list[str]:
    """Sentences on variables that nothing reads, and whose name is nearly that of a flag's."""
    known = [variable_of(flag) for flag in flags_of_serve().values()]
    sentences = []
    for name in sorted(environment):
        near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
        if name.startswith("DISAGG_") and near and name not in known:
            sentences.append(f"Nothing reads {name}; did you mean {near[0]}?")
    return sentences
