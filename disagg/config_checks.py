"""Builds a `ServeConfig` from plain data, and checks everything that can be checked before it is
deployed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec

from disagg.api_keys import (
    DEFAULT_TENANT,
    MIN_KEY_LENGTH,
    can_be_guessed,
    named_keys_in,
    tenants_by_digest,
)
from disagg.config import AUTO, CascadeConfig, HttpConfig, ServeConfig, TierConfig
from disagg.errors import StartupError
from disagg.settings import all_paths, setting_at, settings_of

MIN_CLUSTER_KEY_LENGTH = 16
EXAMPLE_PREFIX = "change-me"  # in the files under deploy/


class InvalidSetting(StartupError):
    """A setting that there is not, or with an invalid value. `path`: `tiers[0].engine.dtype`."""

    def __init__(self, message: str, path: str, param: str | None) -> None:
        super().__init__(message, param=param)
        self.path = path


def parse_config(raw: dict[str, Any]) -> ServeConfig:
    """A checked `ServeConfig` from plain data, as YAML or Serve's `args` give it.

    Raises:
        StartupError: names the key at fault and what would be right.
    """
    try:
        config = msgspec.convert(raw, ServeConfig)
    except msgspec.ValidationError as error:
        text = str(error)
        raise InvalidSetting(
            f"The configuration is not valid: {text}.{_explained(text)}",
            _path_of(text),
            _param_of(text),
        ) from error
    if not config.cluster_key:  # now, and not when workers have loaded their models
        raise StartupError(
            "The cluster key is empty; set cluster_key to a secret of your own, which every process"
            " of the cluster shares.",
            param="cluster_key",
        )
    names = [tier.name for tier in config.tiers]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise StartupError(
            f"Two tiers are named {', '.join(sorted(repeated))}; set served_model_name so that"
            " each has a name of its own.",
            param="served_model_name",
        )
    for tier in config.tiers:
        _check_autoscaling(tier)
        _check_ranks(config, tier)
        _check_expert_parallel(tier)
        if tier.engine.kv_offloading_size and not tier.engine.enable_prefix_caching:
            raise StartupError(
                f"Tier {tier.name!r} keeps evicted KV in host memory, and finds none of it without"
                " prefix caching; set enable_prefix_caching, or kv_offloading_size to 0.",
                param="kv_offloading_size",
            )
        _check_adapters(tier, names)
        if tier.decode.num_replicas == 0 and tier.decode.autoscaling is None:
            raise StartupError(
                f"Tier {tier.name!r} has no decode worker; set decode.num_replicas to at least 1.",
                param="decode",
            )
    _check_origins(config.http)
    _check_budget(config)
    _check_tenants(config)
    cascade = config.cascade
    if cascade is not None:
        if "thresholds" not in raw["cascade"]:
            general = cascade.thresholds * max(1, len(names) - 1)
            cascade = msgspec.structs.replace(cascade, thresholds=general)
            config = msgspec.structs.replace(config, cascade=cascade)
        _check_cascade(cascade, names)
        _check_no_deferral(config.tiers)
    return config


def filled_in(args: Any, environment: Mapping[str, str]) -> Any:
    """`args` with environment variables replaced by their values.

    Raises:
        StartupError: one is not set.
    """
    match args:
        case dict():
            return {key: filled_in(value, environment) for key, value in args.items()}
        case list():
            return [filled_in(value, environment) for value in args]
        case str() if args.startswith("env:"):
            name = args.removeprefix("env:")
            if name not in environment:
                raise StartupError(
                    f"The configuration says {args!r}, but there is no environment variable"
                    f" {name}; set it on every node of the Ray cluster, or write the value itself."
                )
            return environment[name]
    return args


def _path_of(error: str) -> str:
    """The path of the setting that an error of msgspec is about."""
    place = re.search(r" - at `\$\.?(.*)`$", error)
    names = [place[1]] if place is not None and place[1] else []
    if unknown := re.search(r"unknown field `(.*?)`", error):
        names.append(unknown[1])
    return ".".join(names)


def _param_of(error: str) -> str | None:
    """The setting that an error of msgspec is about, such as `num_threads`; settings of a pool have
    its role in front, as flags have."""
    match = re.search(r" - at `\$([\w.\[\]]+)`$", error)
    if match is None or "unknown field" in error:  # then the path is that of the whole section
        return None
    *before, name = re.findall(r"[a-z]\w*", match[1])
    is_of_pool = before[-1:] in (["prefill"], ["decode"])
    return f"{before[-1]}_{name}" if is_of_pool else name


def _explained(error: str) -> str:
    """What msgspec leaves out: the values that are possible where another one was given, or what
    the setting is."""
    if "unknown field" in error:
        return _nearest(_path_of(error))
    match = re.search(r" - at `\$\.(.+)`$", error)
    setting = setting_at(match[1]) if match is not None else None
    if setting is None or " field `" in error:  # then the path is that of the whole section
        return ""
    if setting.values:
        return f" Supported: {', '.join(map(str, setting.values))}."
    return f" {setting.name}: {setting.help}."


FEW_SETTINGS = 10  # that an error lists


def _nearest(path: str) -> str:
    """What was probably meant by a setting that there is not: one with nearly its name beside it,
    or one of its name elsewhere. Otherwise those that there are, if they are few."""
    section, _, name = path.rpartition(".")
    beside = setting_at(section) if section else None
    struct = ServeConfig if not section else beside.section if beside is not None else None
    names = [*settings_of(struct)] if struct is not None else []
    near = get_close_matches(name, names, 1)
    if near:
        return f" Did you mean {near[0]}?"
    places = [each for each in all_paths() if each.rpartition(".")[2] == name]
    if places:
        return f" {name} is a setting of {places[0].rpartition('.')[0]}."
    return f" There are {', '.join(names)}." if len(names) <= FEW_SETTINGS else ""


def _check_adapters(tier: TierConfig, names: list[str]) -> None:
    """Check the names of adapters, and their numbers."""
    engine, modules = tier.engine, tier.lora_modules
    if modules and not engine.enable_lora:
        raise StartupError(
            f"Tier {tier.name!r} has lora_modules, which need enable_lora (--enable-lora).",
            param="enable_lora",
        )
    taken = sorted(modules.keys() & {*names, AUTO})
    if taken or "" in modules:
        raise StartupError(
            f"A LoRA adapter cannot be named {', '.join(taken) or 'with an empty text'}; give each"
            " a name that no model has.",
            param="lora_modules",
        )
    if engine.max_cpu_loras is not None and engine.max_cpu_loras < engine.max_loras:
        raise StartupError(
            f"max_cpu_loras = {engine.max_cpu_loras} is less than max_loras = {engine.max_loras};"
            " adapters come to the device through host memory, so raise it.",
            param="max_cpu_loras",
        )


def _check_origins(http: HttpConfig) -> None:
    for host in http.allowed_media_domains:
        if not re.fullmatch(r"[a-z0-9.-]+", host):
            raise StartupError(
                f"{host!r} is not the name of a host in lower case, without scheme, port and path,"
                " such as images.example.com.",
                param="allowed_media_domains",
            )
    for origin in http.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
            raise StartupError(
                f"{origin!r} is not an origin. Write scheme, host and port as browsers send them,"
                " without a path, such as https://ui.example.com or http://localhost:3000; or * for"
                " any.",
                param="allowed_origins",
            )


def _check_tenants(config: ServeConfig) -> None:
    http = config.http
    tenants_by_digest(http.named_keys())
    if http.api_keys_file is not None:  # who is in it may change
        return
    for name in config.tenants:
        if name != DEFAULT_TENANT and name not in http.api_keys:
            raise StartupError(
                f"There are settings for a tenant {name!r}, and no key; add it to http.api_keys.",
                param="tenants",
            )


def check_secrets(config: ServeConfig, host: str | None = None) -> None:
    """To be called where a deployment begins; a configuration of tests needs no secrets.

    Args:
        host: where HTTP will listen; None: others decide that.

    Raises:
        StartupError: the cluster key can be guessed, or clients of `host` need no API key or one
            that can be guessed.
    """
    if config.insecure:
        return
    for param, secret in (("cluster_key", config.cluster_key), *_named_keys(config.http)):
        if secret.startswith(EXAMPLE_PREFIX):
            raise StartupError(
                f"{param} is still the one of the example, which is public;"
                " `openssl rand -hex 32` makes another one.",
                param=param,
            )
    if len(config.cluster_key) < MIN_CLUSTER_KEY_LENGTH:
        raise StartupError(
            f"cluster_key has fewer than {MIN_CLUSTER_KEY_LENGTH} characters and can be guessed,"
            " and with it a stranger can read KV and control workers. `openssl rand -hex 32` makes"
            " a good one; or set insecure: true.",
            param="cluster_key",
        )
    if config.http.is_open and "*" in config.http.allowed_origins:
        raise StartupError(
            "Any website could use this server through the browsers of its visitors, since it has"
            " no API key. Name the allowed origins instead of *; or set an API key; or pass"
            " --insecure (insecure: true).",
            param="allowed_origins",
        )
    if host is None or is_loopback(host):
        return
    if config.http.is_open:
        raise StartupError(
            f"Any client that reaches {host} could use this server, since it has no API key. Set"
            " --api-key, --tenants or --api-keys-file; or pass --insecure.",
            param="host",
        )
    in_file = named_keys_in(file) if (file := config.http.api_keys_file) is not None else ()
    for name, key in (*config.http.named_keys(), *in_file):
        if can_be_guessed(key):
            raise StartupError(
                f"The API key of {name or DEFAULT_TENANT!r} has fewer than {MIN_KEY_LENGTH}"
                f" characters, so clients that reach {host} can guess it. `openssl rand -hex 32`"
                " makes a good one; or pass --insecure.",
                param="host",
            )


def _named_keys(http: HttpConfig) -> Iterator[tuple[str, str]]:
    if http.metrics_key is not None:
        yield "metrics_key", http.metrics_key
    for name, key in http.named_keys():
        yield ("api_keys" if name else "api_key"), key


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or a name of a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_autoscaling(tier: TierConfig) -> None:
    for role, pool in tier.pools.items():
        limits = pool.autoscaling
        if limits is None:
            continue
        if not limits.min_replicas <= pool.num_replicas <= limits.max_replicas:
            raise StartupError(
                f"Tier {tier.name!r} begins with {pool.num_replicas} {role} workers, and its"
                f" autoscaling allows {limits.min_replicas} to {limits.max_replicas}.",
                param=role,
            )
        if limits.min_replicas == 0 and tier.engine.block_size is None:
            raise StartupError(
                f"Tier {tier.name!r} may be scaled to no {role} worker, from which ingresses learn"
                " the block size; set engine.block_size (usually 16 on a CPU and 64 on a GPU).",
                param="block_size",
            )


def _check_ranks(config: ServeConfig, tier: TierConfig) -> None:
    for role, pool in tier.pools.items():
        size = tier.num_ranks(pool)
        if pool.num_gpus and pool.num_gpus != size and (size > 1 or pool.num_gpus > 1):
            raise StartupError(
                f"Tier {tier.name!r} has tensor_parallel_size = {size}, so each of its {role}"
                f" workers has {size} GPU{'s' if size > 1 else ''}, and num_gpus is"
                f" {pool.num_gpus:g}; leave num_gpus out, or change tensor_parallel_size.",
                param="num_gpus",
            )
        nnodes = tier.num_nodes(pool)
        if size % nnodes:
            raise StartupError(
                f"Tier {tier.name!r} has nnodes = {nnodes}, and its {role} workers have"
                f" tensor_parallel_size = {size}: {size} ranks cannot be divided evenly over"
                f" {nnodes} nodes. Choose sizes where one divides the other.",
                param="nnodes",
            )
        if size > 1 and config.transport == "local":
            raise StartupError(
                f"Tier {tier.name!r} has {role} workers of {size} ranks, which are processes, and"
                " transport = 'local' moves KV within one; set transport to nixl.",
                param="transport",
            )


def _check_expert_parallel(tier: TierConfig) -> None:
    if tier.engine.enable_expert_parallel and all(
        tier.num_ranks(pool) == 1 for pool in tier.pools.values()
    ):
        raise StartupError(
            f"Tier {tier.name!r} has enable_expert_parallel, which divides a model's experts among"
            " the ranks of a worker, and its workers have one rank; set tensor_parallel_size to 2"
            " or more, or leave enable_expert_parallel out.",
            param="enable_expert_parallel",
        )


def _check_budget(config: ServeConfig) -> None:
    if config.max_num_workers is None:
        return
    num_least = sum(
        pool.autoscaling.min_replicas if pool.autoscaling else pool.num_replicas
        for tier in config.tiers
        for pool in tier.pools.values()
    )
    if num_least > config.max_num_workers:
        raise StartupError(
            f"max_num_workers is {config.max_num_workers}, and the pools have at least"
            f" {num_least} workers.",
            param="max_num_workers",
        )


def _check_no_deferral(tiers: Sequence[TierConfig]) -> None:
    for tier in tiers:
        drafts = tier.engine.speculative_config
        if drafts is not None and drafts.deferral:
            raise StartupError(
                f"Tier {tier.name!r} of a cascade lets tokens of its draft model stand (deferral ="
                f" {drafts.deferral:g}), but the cascade's thresholds are for models' own answers."
                " Leave out the deferral, or the cascade.",
                param="speculative_config",
            )


def _check_cascade(cascade: CascadeConfig, names: list[str]) -> None:
    if len(names) < 2:
        raise StartupError(
            "A cascade needs at least two models, the smallest first.", param="cascade"
        )
    if AUTO in names:
        raise StartupError(
            f"With a cascade no model may be named {AUTO!r}: that name lets the cascade choose. Set"
            " served_model_name.",
            param="served_model_name",
        )
    if len(cascade.thresholds) != len(names) - 1:
        raise StartupError(
            f"{len(names)} models need {len(names) - 1} thresholds, one for each but the last;"
            f" {len(cascade.thresholds)} are given.",
            param="cascade",
        )
    for name, given in (("leads", cascade.leads), ("prompt_judges", cascade.prompt_judges)):
        if given and len(given) != len(names) - 1:
            raise StartupError(
                f"{len(names)} models need {len(names) - 1} {name}, one for each but the last, or"
                f" none; {len(given)} are given.",
                param="cascade",
            )
