"""Reads a configuration file, and remembers the line of each setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from disagg.cli.ray_serve_llm import BUILDERS, read_llm_app
from disagg.config_checks import filled_in
from disagg.errors import StartupError

OURS = "disagg.app.build:build"
# Keys of Ray Serve's YAML that `disagg serve` accepts.
OF_SERVE = {"applications", "http_options", "proxy_location"}
OF_AN_APPLICATION = {"name", "route_prefix", "import_path", "args"}
HTTP_OPTIONS = {"host", "port"}
# Where the settings of such a file are, and where they are in a configuration.
_MOVED = {"applications[0].args.": "", "http_options.": "http."}


class ConfigFile(NamedTuple):
    """A file as plain data, and the line of each setting, such as `tiers[0].engine.dtype`."""

    path: str
    raw: dict[str, Any]
    lines: dict[str, int]


def read_config_file(path: str) -> ConfigFile:
    """
    Raises:
        StartupError: it cannot be read, or is a file of Ray Serve with what `disagg serve` lacks.
    """
    raw, lines = read_yaml(Path(path))
    if "applications" in raw:
        raw = _of_serve(raw, path)
        for before, after in _MOVED.items():
            lines = {
                after + name.removeprefix(before) if name.startswith(before) else name: line
                for name, line in lines.items()
            }
    return ConfigFile(path, raw, lines)


def _of_serve(raw: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Read the configuration from a YAML file of Ray Serve (the format of `serve deploy`).

    Raises:
        StartupError: the file is for another application, has settings that only `serve deploy`
            supports, or needs an environment variable that is not set.
    """
    match raw:
        case {"applications": [{"import_path": builder, "args": dict(args)} as application]} if (
            builder in (OURS, *BUILDERS)
        ):
            pass
        case _:
            raise StartupError(
                f"{file} is a YAML file of Ray Serve, but its only application must be disagg"
                f" (import_path: {OURS}, with args) or Ray Serve LLM ({', '.join(BUILDERS)}).",
                param="config",
            )
    options = raw.get("http_options") or {}
    if not isinstance(options, dict):
        raise StartupError(f"http_options in {file} is not a mapping.", param="config")
    for where, given, known in (
        ("", raw, OF_SERVE),
        (" of the application", application, OF_AN_APPLICATION),
        (" of http_options", options, HTTP_OPTIONS),
    ):
        unread = sorted(map(str, given.keys() - known))
        if unread:
            raise StartupError(
                f"`disagg serve` does not support {', '.join(unread)}{where} in {file}; leave it"
                " out, use a setting in args instead, or use `serve deploy`.",
                param="config",
            )
    if application.get("route_prefix", "/") != "/":
        raise StartupError(
            f"`disagg serve` serves at / only, but {file} sets route_prefix to"
            f" {application['route_prefix']}; change it to /, or use `serve deploy`.",
            param="config",
        )
    config: dict[str, Any] = filled_in(args, os.environ)
    if builder != OURS:
        config = read_llm_app(builder, config, Path(file), lambda path: read_yaml(path)[0])
    http = config.get("http") or {}
    if not isinstance(http, dict):
        return config  # parse_config refuses it with a message that names the place
    return {**config, "http": {**options, **http}}


def _yaml_loader() -> Any:
    """Of a key that is there twice, PyYAML would take the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if (key.tag, str(key.value)) in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice",
                                               problem_mark=key.start_mark)  # fmt: skip
                seen.add((key.tag, str(key.value)))
            return node

    return Loader


def _lines_of(node: Any, path: str) -> Iterator[tuple[str, int]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            yield name, key.start_mark.line + 1
            yield from _lines_of(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            name = f"{path}[{number}]"
            yield name, item.start_mark.line + 1
            yield from _lines_of(item, name)


def read_yaml(path: Path, param: str = "config") -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping of a YAML or JSON file, and the line of each of its keys.

    Raises:
        StartupError: it cannot be read, or is no mapping.
    """
    import yaml

    loader = _yaml_loader()
    try:
        text = path.read_text()
        documents = list(yaml.load_all(text, loader))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise StartupError(
            f"Cannot read the configuration {path}: {error}.", param=param
        ) from error
    if any(isinstance(each, dict) and each.get("kind") == "RayService" for each in documents):
        raise StartupError(
            f"{path} is a file for KubeRay: `kubectl apply -f {path}` deploys it. To serve the same"
            " on this machine, save the text of its serveConfigV2 in a separate file.",
            param=param,
        )
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise StartupError(
            f"The configuration {path} must be one YAML document with keys and values.",
            param=param,
        )
    return documents[0], dict(_lines_of(yaml.compose(text, loader), ""))
