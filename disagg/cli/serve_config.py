"""Builds a `ServeConfig` from the flags of `disagg serve` or from a file."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from disagg.cli.serve_arguments import DEFAULT_MODEL, PoolSize, add_arguments
from disagg.config import ASSETS, EngineConfig, HttpConfig, ServeConfig, TierConfig, TransferPrior
from disagg.config_checks import filled_in, parse_config
from disagg.errors import StartupError
from disagg.host import read_memory

BUNDLED = ("demo-small", "demo-large")
STORE_SHARE = 16  # the embedded store gets one sixteenth of the free memory
LEAST_STORE_NBYTES, MOST_STORE_NBYTES = 32 << 20, 1 << 30

# Keys of Ray Serve's YAML that `disagg serve` accepts.
OF_SERVE = {"applications", "http_options", "proxy_location"}
OF_AN_APPLICATION = {"name", "route_prefix", "import_path", "args"}
HTTP_OPTIONS = {"host", "port"}

# Flags of the command itself rather than of the deployment; --config allows these beside it.
OF_THE_COMMAND = (
    "config",
    "ray_address",
    "replace",
    "haproxy",
    "restart",
    "log_dir",
    "log_format",
)


def _store_nbytes(configured: int | None) -> int:
    """Size of the embedded store. It fills up within minutes, so it must leave workers room."""
    if configured is not None:
        return configured
    _, available = read_memory()
    return max(LEAST_STORE_NBYTES, min(MOST_STORE_NBYTES, available // STORE_SHARE))


def _refuse_beside_config(arguments: argparse.Namespace) -> None:
    """Raises `StartupError` if the user gave a flag that describes the deployment."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = {
        dest: word if isinstance(word, str) else "MODEL"
        for dest, word in getattr(arguments, "given", {}).items()
    }
    for dest, default in vars(parser.parse_args([])).items():  # switches are not in `given`
        if getattr(arguments, dest) != default:
            given.setdefault(dest, f"--{dest.replace('_', '-')}")
    beside = sorted(word for dest, word in given.items() if dest not in OF_THE_COMMAND)
    if beside:
        raise StartupError(
            f"--config describes the whole deployment, so {', '.join(beside)} would have no effect;"
            f" put the setting into {arguments.config}, or leave --config out.",
            param="config",
        )


def config_from_arguments(arguments: argparse.Namespace) -> ServeConfig:
    """The flags, or the file given by --config, as a validated configuration."""
    return parse_config(raw_config(arguments))


def raw_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration as plain data. With --config it holds only what the file sets."""
    if arguments.config:
        _refuse_beside_config(arguments)
        raw = _read_config_file(Path(arguments.config))
        if "applications" in raw:
            raw = _of_serve(raw, arguments.config)
        http = raw.get("http") or {}
        if (
            arguments.api_key
            and isinstance(http, dict)
            and not http.keys() & {"api_key", "api_keys"}
        ):
            raw["http"] = {**http, "api_key": arguments.api_key}  # from DISAGG_API_KEY
        return {**raw, "cluster_key": raw.get("cluster_key") or _new_key()}
    models = arguments.model or [DEFAULT_MODEL]
    names, revisions = arguments.served_model_name, arguments.revision
    _check_one_per_model(models, names, "served names", "served_model_name")
    _check_one_per_model(models, revisions, "revisions", "revision")
    sections = {
        "prefill": _pool(arguments, "prefill"),
        "decode": _pool(arguments, "decode"),
        "engine": _given(arguments, EngineConfig),
        "ttft_slo_s": arguments.ttft_slo_s,  # also where it is none
    }
    tiers = [
        {
            **_given(arguments, TierConfig),
            **sections,
            "model": model,
            "revision": revision,
            "served_model_name": name,
        }
        for model, name, revision in zip(
            models, names or [None] * len(models), revisions or [None] * len(models), strict=True
        )
    ]
    api_keys, tenants = _tenants(arguments.tenants)
    nbytes = arguments.cold_tier_nbytes
    return {
        **_given(arguments, ServeConfig),
        "tiers": tiers,
        "tenants": tenants,
        "cascade": _cascade_section(arguments.cascade, models),
        "http": {**_given(arguments, HttpConfig), "api_keys": api_keys},
        "transfer_prior": _transfer_prior(arguments.doctor_report),
        "cold_tier_nbytes": 0 if arguments.no_redis else _store_nbytes(nbytes),
        "link_host": None if arguments.ray_address else "127.0.0.1",
        "cluster_key": _new_key(),
    }


def _given(arguments: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The settings of a struct that have a flag and a value."""
    values = ((name, getattr(arguments, name, None)) for name in struct.__struct_fields__)
    return {name: value for name, value in values if value is not None}


def _of_serve(raw: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Read the configuration from a YAML file of Ray Serve (the format of `serve deploy`).

    Raises:
        StartupError: the file is for another application, has settings that only `serve deploy`
            supports, or needs an environment variable that is not set.
    """
    match raw:
        case {
            "applications": [
                {"import_path": "disagg.app.build:build", "args": dict(args)} as application
            ]
        }:
            pass
        case _:
            raise StartupError(
                f"{file} is a YAML file of Ray Serve, but its only application must be disagg"
                " (import_path: disagg.app.build:build, with args).",
                param="config",
            )
    options = raw.get("http_options") or {}
    if not isinstance(options, dict):
        raise StartupError(f"http_options in {file} is not a mapping.", param="config")
    for place, given, known in (
        ("", raw, OF_SERVE),
        (" of the application", application, OF_AN_APPLICATION),
        (" of http_options", options, HTTP_OPTIONS),
    ):
        unread = sorted(map(str, given.keys() - known))
        if unread:
            raise StartupError(
                f"`disagg serve` does not support {', '.join(unread)}{place} in {file}; leave it"
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
    http = config.get("http") or {}
    if not isinstance(http, dict):
        return config  # parse_config refuses it with a message that names the place
    return {**config, "http": {**options, **http}}


def _check_one_per_model(models: list[str], given: list[str], what: str, param: str) -> None:
    """Raises `StartupError` if a flag with one value per model has another number of values."""
    if given and len(given) != len(models):
        raise StartupError(
            f"There {'is 1 model' if len(models) == 1 else f'are {len(models)} models'}, and the"
            f" flag got {len(given)} {what}: {', '.join(given)}. Give one per model, and put the"
            " models before this flag, because it takes all words that follow it.",
            param=param,
        )


def _pool(arguments: argparse.Namespace, role: str) -> dict[str, Any]:
    """A pool's section. A scaled pool starts with its minimum, and with one worker at least."""
    size: PoolSize | None = getattr(arguments, role)
    settings = {
        "num_gpus": arguments.num_gpus,
        "tensor_parallel_size": getattr(arguments, f"{role}_tensor_parallel_size"),
        "nnodes": getattr(arguments, f"{role}_nnodes"),
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    if size is None:
        return settings
    if size.least == size.most:
        return {"num_replicas": size.least, **settings}
    limits = {"min_replicas": size.least, "max_replicas": size.most}
    return {"num_replicas": max(1, size.least), "autoscaling": limits, **settings}


class _DoctorReport(msgspec.Struct):
    """What is read of the output of `disagg doctor --json`."""

    transfer_prior: TransferPrior | None = None


def _transfer_prior(path: str | None) -> TransferPrior | None:
    if path is None:
        return None
    try:
        prior = msgspec.json.decode(Path(path).read_bytes(), type=_DoctorReport).transfer_prior
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(
            f"{path} is not a report of `disagg doctor --json`: {error}.", param="doctor_report"
        ) from error
    if prior is None:
        raise StartupError(
            f"{path} contains no measured KV transfer: run `disagg doctor --json` without"
            " --no-transfers, and fix the problems that it reports.",
            param="doctor_report",
        )
    return prior


def _tenants(file: str | None) -> tuple[Any, Any]:
    """Read the sections `api_keys` and `tenants` of a file."""
    if file is None:
        return {}, {}
    raw = _read_config_file(Path(file), param="tenants")
    if "api_keys" not in raw or not set(raw) <= {"api_keys", "tenants"}:
        raise StartupError(
            f"{file} must have the section api_keys, may have the section tenants, and must have"
            " nothing else.",
            param="tenants",
        )
    return raw["api_keys"], raw.get("tenants") or {}


def bundled_cascade() -> Any:
    """The `cascade` section that was calibrated for demo-small and demo-large."""
    return _read_config_file(ASSETS / "cascade.yaml")["cascade"]


def _cascade_section(file: str | None, models: list[str]) -> Any:
    """The `cascade` section for --cascade.

    Args:
        file: None without --cascade, "" for --cascade without a file.
    """
    if file is None:
        return None
    if not file:
        if models == list(BUNDLED):  # the bundled prompt judge was trained for these two only
            return bundled_cascade()
        return {}
    if not Path(file).is_file():
        raise StartupError(
            f"There is no file {file}. The word after --cascade names a file; if {file} is a model,"
            " put the models before this flag.",
            param="cascade",
        )
    raw = _read_config_file(Path(file), param="cascade")
    if set(raw) != {"cascade"}:
        raise StartupError(
            f"{file} must have a cascade section and nothing else; `disagg cascade calibrate"
            " --write` makes such a file.",
            param="cascade",
        )
    return raw["cascade"]


def _new_key() -> str:
    return secrets.token_hex(32)


def _yaml_documents(text: str) -> list[Any]:
    """The documents of a YAML file. Of a key that is there twice, PyYAML would take the last."""
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

    return list(yaml.load_all(text, Loader))


def _read_config_file(path: Path, param: str = "config") -> dict[str, Any]:
    import yaml

    try:
        documents = _yaml_documents(path.read_text())
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
    return documents[0]
