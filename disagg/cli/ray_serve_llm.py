"""Reads a configuration of Ray Serve LLM (`ray.serve.llm`) as far as it means the same here.

Its engine is vLLM, so workers get `engine: {backend: vllm}`. What disagg does in its own way is
named in the log, and everything else is refused.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from disagg.config import EngineConfig
from disagg.errors import StartupError
from disagg.worker.vllm.arguments import OF_ADAPTERS, SAME

log = logging.getLogger(__name__)

# What builds the application of such a file, and where its arguments have models.
BUILDERS = {
    "ray.serve.llm:build_openai_app": ("llm_configs",),
    "ray.serve.llm:build_pd_openai_app": ("prefill_config", "decode_config"),
}
# What has no effect, and why it needs none.
IGNORED = {
    "log_engine_metrics": "GET /metrics has them",
    "deployment_config.max_ongoing_requests": "ingresses hold requests back by predicted times",
    "deployment_config.autoscaling_config.target_ongoing_requests": "pools scale by the SLO",
    "deployment_config.autoscaling_config.initial_replicas": "a pool begins with min_replicas",
    "lora_config.download_timeout_s": "adapters are directories",
    "lora_config.max_download_tries": "adapters are directories",
    "engine_kwargs.kv_transfer_config": "it is set where there are prefill workers",
    "engine_kwargs.enable_auto_tool_choice": "formats of calls are detected",
}
OF_THE_TIER = ("chat_template", "tool_call_parser", "reasoning_parser")
ACTOR_OPTIONS = ("num_cpus", "num_gpus", "resources")
MOST_LORAS = EngineConfig().max_loras
SHARE_OF_KIND = 0.001  # of the resource with which Ray finds nodes with an accelerator of a kind

Raw: TypeAlias = dict[str, Any]
Read: TypeAlias = Callable[[Path], Raw]


def read_llm_app(builder: str, args: Mapping[str, Any], file: Path, read: Read) -> Raw:
    """The tiers of an application.

    Args:
        builder: one of `BUILDERS`.
        args: its arguments, in which models may be paths of files.
        read: reads such a file.

    Raises:
        StartupError: a setting has no counterpart.
    """
    places = BUILDERS[builder]
    if unread := sorted(args.keys() - {*places}):
        raise _refusal(unread, file)
    if len(places) == 1:
        configs = args.get(places[0])
        if not configs or not isinstance(configs, list):
            raise StartupError(f"llm_configs in {file} is no list of models.", param="config")
        return {
            "tiers": [
                _tier(each, f"llm_configs[{number}]", file, read)
                for number, each in enumerate(configs)
            ]
        }
    prefill, tier = (_tier(args.get(place), place, file, read) for place in places)
    pools = {"prefill": prefill.pop("decode"), "decode": tier.pop("decode")}
    for pool, engine in ((pools["prefill"], prefill["engine"]), (pools["decode"], tier["engine"])):
        pool["tensor_parallel_size"] = engine.pop("tensor_parallel_size", 1)
    if prefill != tier:
        raise StartupError(
            f"prefill_config and decode_config in {file} differ in more than their deployment and"
            " tensor_parallel_size, but here the workers of a model have one configuration.",
            param="config",
        )
    return {"tiers": [tier | pools]}


def _tier(config: Any, place: str, file: Path, read: Read) -> Raw:
    """The tier of an `LLMConfig`. What is read is taken out of it, and nothing may be left."""
    if isinstance(config, str):
        file, place = file.parent / config, "the document"
        config = read(file)
    if not isinstance(config, dict):
        raise StartupError(
            f"{place} in {file} is not the configuration of a model.", param="config"
        )
    left = copy.deepcopy(config)
    for path, why in IGNORED.items():
        section, _, name = path.rpartition(".")
        if _at(left, section).pop(name, None) is not None:
            log.warning("%s has no effect here: %s.", path, why)
    loading, kwargs = _at(left, "model_loading_config"), _at(left, "engine_kwargs")
    name = loading.pop("model_id", None)
    source = loading.pop("model_source", None) or name
    if not isinstance(source, str):
        raise StartupError(
            f"{place} in {file} needs a model_loading_config with a model_id, and a model_source"
            " can only be a directory or a model of Hugging Face, not a bucket.",
            param="config",
        )
    engine: Raw = {"backend": "vllm", **_taken(kwargs, (*SAME, *OF_ADAPTERS))}
    tier: Raw = {"model": source, "served_model_name": name, **_taken(kwargs, OF_THE_TIER)}
    if left.get("lora_config") is not None:
        engine |= _adapters(_at(left, "lora_config"), engine.get("max_loras", MOST_LORAS))
    if kwargs:
        engine["engine_args"] = dict(kwargs)
        kwargs.clear()
    tier |= {"engine": engine, "prefill": {"num_replicas": 0}, "decode": _pool(left)}
    if left.get("llm_engine") == "vLLM":
        del left["llm_engine"]
    if unread := sorted(_paths(left)):
        raise _refusal(unread, file)
    return tier


def _pool(left: Raw) -> Raw:
    """The workers of a deployment."""
    deployment = _at(left, "deployment_config")
    scaling, num_replicas = _at(left, "deployment_config.autoscaling_config"), 1
    limits = _taken(scaling, ("min_replicas", "max_replicas"))
    if (given := deployment.get("num_replicas")) != "auto":
        num_replicas = _count(given or limits.get("min_replicas", 1), "a number of replicas")
    elif not limits:
        limits = {"min_replicas": 1, "max_replicas": 100}  # as Serve has it
    deployment.pop("num_replicas", None)
    pool: Raw = {"num_replicas": max(1, num_replicas)}
    if limits:
        pool["autoscaling"] = limits
    pool |= _taken(_at(left, "deployment_config.ray_actor_options"), ACTOR_OPTIONS)
    kind = left.pop("accelerator_type", None)
    if kind is not None and isinstance(others := pool.get("resources") or {}, dict):
        pool["resources"] = {f"accelerator_type:{kind}": SHARE_OF_KIND, **others}
    if left.get("accelerator_config") == {"kind": "cpu"}:
        del left["accelerator_config"]
        pool["num_gpus"] = 0
    return pool


def _adapters(lora: Raw, max_loras: Any) -> Raw:
    """The engine's settings for adapters, which clients load; Ray reads them from a bucket."""
    if place := lora.get("dynamic_lora_loading_path"):
        raise StartupError(
            f"lora_config.dynamic_lora_loading_path is {place}: adapters are not read from buckets."
            " Leave it out, and load each directory with POST /v1/load_lora_adapter.",
            param="config",
        )
    most = _count(lora.pop("max_num_adapters_per_replica", 16), "max_num_adapters_per_replica")
    at_once = min(most, _count(max_loras, "max_loras"))
    return {"enable_lora": True, "max_cpu_loras": most, "max_loras": at_once}


def _count(raw: Any, what: str) -> int:
    if isinstance(raw, int):
        return raw
    raise StartupError(
        f"{what} is {raw!r}, which is not a whole number; leave it out, or write one.",
        param="config",
    )


def _taken(section: Raw, names: tuple[str, ...]) -> Raw:
    return {name: section.pop(name) for name in names if name in section}


def _at(raw: Raw, path: str) -> Raw:
    """A section, or an empty one that is not part of `raw`."""
    for name in filter(None, path.split(".")):
        raw = raw.get(name) if isinstance(raw.get(name), dict) else {}  # type: ignore[assignment]
    return raw


def _paths(raw: Any, path: str = "") -> Iterator[str]:
    """Of all that is left; sections that are empty now were read."""
    if isinstance(raw, dict):
        for name, value in raw.items():
            yield from _paths(value, f"{path}.{name}" if path else str(name))
    elif raw is not None:
        yield path


def _refusal(unread: list[str], file: Path) -> StartupError:
    return StartupError(
        f"`disagg serve` does not read {', '.join(unread)} of Ray Serve LLM in {file}; leave it"
        " out, or write a configuration of disagg (docs/engines.md).",
        param="config",
    )
