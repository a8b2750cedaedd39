"""Flags of settings, and the engine's, some of which `disagg doctor` has too."""

from __future__ import annotations

import argparse
import json
import re
from decimal import Decimal
from typing import Any

import msgspec
from msgspec.inspect import FloatType, IntType, StructType

from disagg.config import EngineConfig, PoolConfig
from disagg.settings import settings_of


def json_object(text: str) -> Any:
    """Parse JSON; the configuration checks its content. Raises `argparse.ArgumentTypeError`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def number(text: str) -> int:
    """Parse an integer with one of vLLM's suffixes: 8k is 8000, 8K is 8192, 1.5m is 1500000.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    match = re.fullmatch(r"(-?[0-9]+)([kKmMgGtT]?)|([0-9]+\.[0-9]+)([kmgt])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 8192, 8K (8 * 1024) or 8k (8 * 1000)"
        )
    suffix = match[2] or match[4] or ""
    unit = (1024 if suffix.isupper() else 1000) ** " kmgt".index(suffix.lower() or " ")
    return int(Decimal(match[1] or match[3]) * unit)


def add_setting(
    group: argparse._ActionsContainer,
    struct: type[msgspec.Struct],
    name: str,
    *,
    flag: str = "",
    more: str = "",
    **options: Any,
) -> None:
    """Add the flag of a setting, with the type, default and description that it has in `config`.

    Args:
        flag: the flag's name if it is not the setting's.
        more: added to the description.
        options: of `add_argument`, in place of what follows from the setting.
    """
    setting = settings_of(struct)[name]
    if isinstance(setting.default, bool):
        options["action"] = argparse.BooleanOptionalAction if setting.default else "store_true"
    else:
        types = {IntType: number, FloatType: float, StructType: json_object}
        options.setdefault("type", types.get(type(setting.kind)))
        if flag and "choices" not in options:
            options.setdefault("metavar", flag.removeprefix("--").replace("-", "_").upper())
    options.setdefault("default", setting.default)
    text = setting.help.replace("%", "%%") + more
    group.add_argument(flag or f"--{name.replace('_', '-')}", dest=name, help=text, **options)


def add_model_arguments(group: argparse._ActionsContainer) -> None:
    """Add the flags that decide how much memory a model needs, and how much of it is for KV."""
    add_setting(group, EngineConfig, "dtype")
    add_setting(group, EngineConfig, "kv_cache_dtype")
    weights = settings_of(EngineConfig)["quantization"].values
    add_setting(group, EngineConfig, "quantization", choices=weights)
    for name in ("device", "max_model_len", "gpu_memory_utilization"):
        add_setting(group, EngineConfig, name)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that a command has flags for, without those that are not set."""
    named = ((name, getattr(arguments, name, None)) for name in EngineConfig.__struct_fields__)
    return {name: value for name, value in named if value is not None}


def add_engine_arguments(group: argparse._ActionsContainer) -> None:
    engines = settings_of(EngineConfig)["backend"].values
    add_setting(group, EngineConfig, "backend", flag="--engine", choices=engines)
    add_setting(group, EngineConfig, "engine_args", type=json_object, metavar="JSON")
    add_model_arguments(group)
    add_setting(group, EngineConfig, "tensor_parallel_size", metavar="RANKS")
    _add_for_pools(group, "tensor_parallel_size", "RANKS")
    add_setting(group, EngineConfig, "enable_expert_parallel")
    add_setting(group, EngineConfig, "nnodes", metavar="NODES")
    _add_for_pools(group, "nnodes", "NODES")
    add_setting(group, PoolConfig, "num_gpus", flag="--num-gpus-per-worker", metavar="SHARE")
    for name in (
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "kv_offloading_size",
        "num_gpu_blocks_override",
        "enable_prefix_caching",
        "enforce_eager",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
    ):
        add_setting(group, EngineConfig, name)
    add_setting(group, EngineConfig, "speculative_config", metavar="JSON")
    add_setting(group, EngineConfig, "num_threads")


def _add_for_pools(group: argparse._ActionsContainer, name: str, metavar: str) -> None:
    """Add flags that override the flag added before them, for one pool each."""
    for role in ("prefill", "decode"):
        flag = f"--{role}-{name.replace('_', '-')}"
        text = f"the same for {role} workers only"
        group.add_argument(flag, type=number, metavar=metavar, help=text)
