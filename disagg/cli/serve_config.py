"""Builds a `ServeConfig`: a file, over it environment variables, over them flags."""

from __future__ import annotations

import argparse
import functools
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disagg.cli.config_file import ConfigFile, read_config_file, read_yaml
from disagg.cli.serve_arguments import (
    DEFAULT_MODEL,
    OF_THE_COMMAND,
    PoolSize,
    add_arguments,
    flags_of,
    given_in,
    variable_of,
)
from disagg.config import ASSETS, EngineConfig, HttpConfig, ServeConfig, TierConfig, TransferPrior
from disagg.config_checks import InvalidSetting, parse_config
from disagg.errors import StartupError
from disagg.host import read_memory

BUNDLED = ("demo-small", "demo-large")
STORE_SHARE = 16  # the embedded store gets one sixteenth of the free memory
LEAST_STORE_NBYTES, MOST_STORE_NBYTES = 32 << 20, 1 << 30
# Settings whose flags have another form: a number or range of workers, a file, one word per model.
OF_ANOTHER_FORM = {
    *("prefill", "decode", "engine", "http", "tiers", "cascade", "tenants"),
    *("model", "revision", "served_model_name"),
}

Given = Mapping[str, Any]  # values by the `dest` of their flags


class Layers(NamedTuple):
    """A configuration as plain data, and how it came about.

    base: the file, or the models of the command.
    environment: the same with environment variables.
    raw: the same with flags; all of it that is not a default.
    """

    file: ConfigFile | None
    base: dict[str, Any]
    environment: dict[str, Any]
    raw: dict[str, Any]

    def config(self) -> ServeConfig:
        """Raises `StartupError`, which names the file and line, or the variable, at fault."""
        try:
            return parse_config(self.raw)
        except StartupError as error:
            raise self._placed(error) from error

    def origin(self, path: str) -> str:
        """Where a setting was set: `serve.yaml, line 3`, `DISAGG_PORT`, `--port`; "" nowhere."""
        value = value_at(self.raw, path)
        if value != value_at(self.environment, path):
            return _name_of(path).flag
        if value != value_at(self.base, path):
            return _name_of(path).variable
        if self.file is not None and (line := self._line(path)):
            return f"{self.file.path}, line {line}"
        return ""

    def _line(self, path: str) -> int | None:
        assert self.file is not None
        return self.file.lines.get(path) or self.file.lines.get(path.partition("[...]")[0])

    def _placed(self, error: StartupError) -> StartupError:
        """The error with the place of its setting; a flag is named by the command."""
        for path in self._paths_of(error):
            origin = self.origin(path)
            if origin.startswith("--"):
                break
            if origin:
                return StartupError(f"{origin}: {error.message}")
        return error

    def _paths_of(self, error: StartupError) -> list[str]:
        if isinstance(error, InvalidSetting):
            return [error.path]
        if error.param is None:
            return []
        return [path for path, _ in settings_in(self.raw) if _name_of(path).dest == error.param]


def value_at(raw: Any, path: str) -> Any:
    """The value of a setting such as `tiers[0].engine.dtype`; None if there is none."""
    for name in path.replace("[", ".[").split("."):
        match raw:
            case dict():
                raw = raw.get(name)
            case list() | tuple() if name[1:-1].isdigit() and int(name[1:-1]) < len(raw):
                raw = raw[int(name[1:-1])]
            case _:
                return None
    return raw


def settings_in(raw: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values below a section, with their paths."""
    match raw:
        case dict() if raw:
            for name, value in raw.items():
                yield from settings_in(value, f"{path}.{name}" if path else str(name))
        case list() | tuple() if any(isinstance(each, dict) for each in raw):
            for number, value in enumerate(raw):
                yield from settings_in(value, f"{path}[{number}]")
        case _:
            yield path, raw


class _Name(NamedTuple):
    dest: str
    flag: str
    variable: str


def _name_of(path: str) -> _Name:
    """The flag and the environment variable of a setting; if it has none, their common words."""
    *before, name = path.rpartition("]")[2].lstrip(".").split(".")
    dests = [f"{before[-1]}_{name}" if before[-1:] in (["prefill"], ["decode"]) else name, name]
    if name in ("num_replicas", "autoscaling", "min_replicas", "max_replicas") and before:
        dests = [each for each in before if each in ("prefill", "decode")]
    elif before[-1:] not in (["prefill"], ["decode"]):  # perhaps a part of a flag's JSON
        dests += before[-1:]
    flags = flags_of_serve()
    for dest in dests:
        if dest in flags:
            return _Name(dest, flags[dest].option_strings[0], variable_of(flags[dest]))
    return _Name(name, "a flag", "the environment")


@functools.cache
def flags_of_serve() -> dict[str, argparse.Action]:
    """The flags that describe a deployment, by `dest`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return flags_of(parser)


def layers_of(arguments: argparse.Namespace) -> Layers:
    """
    Raises:
        StartupError: a file cannot be read, a variable has no valid value, or flags contradict
            each other.
    """
    given = {name: value for name, value in vars(arguments).items() if name not in OF_THE_COMMAND}
    of_environment = given_in(os.environ, flags_of_serve())
    models = given.get("model")
    if arguments.config:
        if models:
            raise StartupError(
                f"{arguments.config} names its models, so {' '.join(models)} beside --config would"
                " have no effect; put them into the file.",
                param="config",
            )
        file = read_config_file(arguments.config)
        base = dict(file.raw)
        if not base.get("cluster_key"):
            base["cluster_key"] = _new_key()
        http = base.get("http")
        if isinstance(http, dict) and http.keys() & {"api_keys", "api_keys_file"}:
            of_environment.pop("api_key", None)  # it is that of a client, such as `disagg chat`
    else:
        file = None
        base = {
            "tiers": [{"model": model} for model in models or [DEFAULT_MODEL]],
            "cold_tier_nbytes": _store_nbytes(),
            "link_host": None if arguments.ray_address else "127.0.0.1",
            "cluster_key": _new_key(),
        }
    environment = overlaid(base, of_environment)
    return Layers(file, base, environment, overlaid(environment, given))


def overlaid(raw: dict[str, Any], given: Given) -> dict[str, Any]:
    """A configuration with other values for what is given. What is no section stays as it is, for
    `parse_config` to refuse."""
    made = {**raw, **_of(given, ServeConfig)}
    if given.get("no_redis"):
        made["cold_tier_nbytes"] = 0
    if "doctor_report" in given:
        made["transfer_prior"] = _transfer_prior(given["doctor_report"])
    http = _of(given, HttpConfig)
    if "tenants" in given:
        http["api_keys"], made["tenants"] = _tenants(given["tenants"])
    if http:
        made["http"] = _over(raw.get("http"), http)
    tiers = raw.get("tiers")
    if isinstance(tiers, list) and all(isinstance(tier, dict) for tier in tiers):
        made["tiers"] = _tiers(tiers, given)
        if "cascade" in given:
            models = [str(tier.get("model")) for tier in tiers]
            made["cascade"] = _cascade_section(given["cascade"], models)
    return made


def _tiers(tiers: list[dict[str, Any]], given: Given) -> list[dict[str, Any]]:
    """The tiers, each with what is given for all or for it."""
    names = ("revision", "served_model_name")
    for name, what in zip(names, ("revisions", "served names"), strict=True):
        values = given.get(name)
        if values and len(values) != len(tiers):
            raise StartupError(
                f"There {'is 1 model' if len(tiers) == 1 else f'are {len(tiers)} models'}, and the"
                f" flag got {len(values)} {what}: {', '.join(values)}. Give one per model, and put"
                " the models before this flag, because it takes all words that follow it.",
                param=name,
            )
    modules = dict(given.get("lora_modules") or ())
    if modules and len(tiers) > 1:
        raise StartupError(
            f"--lora-modules are of one model, but {len(tiers)} are served; give lora_modules of"
            " each in a file (--config).",
            param="lora_modules",
        )
    made = []
    for number, tier in enumerate(tiers):
        own = {name: given[name][number] for name in names if given.get(name)}
        own |= {"lora_modules": modules} if modules else {}
        sections = {"engine": _of(given, EngineConfig)}
        sections |= {role: _pool(given, role, tier.get(role)) for role in ("prefill", "decode")}
        made.append(
            {
                **tier,
                **_of(given, TierConfig),
                **own,
                **{name: _over(tier.get(name), each) for name, each in sections.items() if each},
            }
        )
    return made


def _of(given: Given, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """What is given of the settings of a struct."""
    names = set(struct.__struct_fields__) - OF_ANOTHER_FORM
    return {name: value for name, value in given.items() if name in names}


def _over(section: Any, values: dict[str, Any]) -> Any:
    if section is None:
        return values
    return {**section, **values} if isinstance(section, dict) else section


def _store_nbytes() -> int:
    """Size of the embedded store. It fills up within minutes, so it must leave workers room."""
    _, available = read_memory()
    return max(LEAST_STORE_NBYTES, min(MOST_STORE_NBYTES, available // STORE_SHARE))


def _pool(given: Given, role: str, before: Any) -> dict[str, Any]:
    """What is given of a pool. A scaled one starts with its minimum, and with a worker at least."""
    settings = {
        "num_gpus": given.get("num_gpus"),
        "tensor_parallel_size": given.get(f"{role}_tensor_parallel_size"),
        "nnodes": given.get(f"{role}_nnodes"),
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    size: PoolSize | None = given.get(role)
    if size is None:
        return settings
    if size.least == size.most:
        fixed = (
            {"autoscaling": None} if isinstance(before, dict) and "autoscaling" in before else {}
        )
        return {"num_replicas": size.least, **fixed, **settings}
    limits = {"min_replicas": size.least, "max_replicas": size.most}
    return {"num_replicas": max(1, size.least), "autoscaling": limits, **settings}


class _DoctorReport(msgspec.Struct):
    """What is read of the output of `disagg doctor --json`."""

    transfer_prior: TransferPrior | None = None


def _transfer_prior(path: str) -> TransferPrior:
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


def _tenants(file: str) -> tuple[Any, Any]:
    """Read the sections `api_keys` and `tenants` of a file."""
    raw, _ = read_yaml(Path(file), param="tenants")
    if "api_keys" not in raw or not set(raw) <= {"api_keys", "tenants"}:
        raise StartupError(
            f"{file} must have the section api_keys, may have the section tenants, and must have"
            " nothing else.",
            param="tenants",
        )
    return raw["api_keys"], raw.get("tenants") or {}


def bundled_cascade() -> Any:
    """The `cascade` section that was calibrated for demo-small and demo-large."""
    return read_yaml(ASSETS / "cascade.yaml")[0]["cascade"]


def _cascade_section(file: str, models: list[str]) -> Any:
    """The `cascade` section for --cascade.

    Args:
        file: "" for --cascade without a file.
    """
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
    raw, _ = read_yaml(Path(file), param="cascade")
    if set(raw) != {"cascade"}:
        raise StartupError(
            f"{file} must have a cascade section and nothing else; `disagg cascade calibrate"
            " --write` makes such a file.",
            param="cascade",
        )
    return raw["cascade"]


def _new_key() -> str:
    return secrets.token_hex(32)
