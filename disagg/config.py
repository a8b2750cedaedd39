"""All settings, frozen and checked once. Built from flags (`cli/`) or YAML (`app/build.py`).

Unknown keys are refused. "auto" is resolved where the machine is known: in the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from disagg.errors import ModelError, StartupError

ASSETS = Path(__file__).parent / "assets"

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Fraction: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, on one device. Names follow vLLM's flags."""

    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None  # 16 on a CPU, 64 on a GPU
    max_model_len: Positive | None = None  # the model's own limit
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 1024
    gpu_memory_utilization: Fraction = 0.9
    kv_cache_memory_bytes: Positive | None = None
    num_gpu_blocks_override: Positive | None = None
    enable_prefix_caching: bool = True
    num_threads: Positive | None = None  # of torch, on a CPU
    max_requests_nbytes: Positive = 256 << 20  # prompts on one worker, waiting and running


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of one role in one tier."""

    num_replicas: Annotated[int, Meta(ge=0)] = 1
    num_standby: Annotated[int, Meta(ge=0)] = 0  # more, loaded, that serve when others are gone
    num_cpus: Annotated[float, Meta(ge=0)] = 0
    num_gpus: Annotated[float, Meta(ge=0)] = 0
    resources: dict[str, float] = {}


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model with its own prefill and decode pools."""

    model: str  # a directory, or the name of a bundled model
    served_model_name: str | None = None  # the directory's name
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    engine: EngineConfig = EngineConfig()
    chat_template: str | None = None  # a path; the model's own when absent
    ttft_slo_s: Annotated[float, Meta(gt=0)] = 30.0  # who would wait longer is refused

    @property
    def name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def directory(self) -> Path:
        """Where the model lies. A directory of that name wins over a bundled model.

        Raises:
            ModelError: there is neither.
        """
        for candidate in (Path(self.model), ASSETS / self.model):
            if candidate.is_dir():
                return candidate
        bundled = ", ".join(sorted(each.name for each in ASSETS.iterdir() if each.is_dir()))
        raise ModelError(
            f"There is no model directory {self.model!r}, and the bundled models are {bundled}."
            " Nothing is downloaded: give the path of a Hugging Face model directory.",
            param="model",
        )


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    api_key: str | None = None
    max_body_nbytes: Positive = 16 << 20
    max_num_requests: Positive = 4096  # in flight in one ingress
    max_requests_nbytes: Positive = 256 << 20  # their bodies
    default_timeout_s: Annotated[float, Meta(gt=0)] = 600.0


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment."""

    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)]
    http: HttpConfig = HttpConfig()
    num_ingress: Positive = 1
    transport: Literal["nixl", "local"] = "nixl"
    redis_url: str | None = None  # None: no store; the CLI starts an embedded server
    cold_tier_nbytes: Annotated[int, Meta(ge=0)] = 1 << 30  # 0: no cold KV tier
    cluster_key: str = ""  # shared secret of the links, never empty; the CLI draws one
    link_host: str | None = None  # where workers listen; None: the node's own address
    drain_s: Annotated[float, Meta(ge=0)] = 60.0  # how long a stopping worker finishes its streams

    def tier(self, name: str) -> TierConfig:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers)
        raise StartupError(f"No tier is named {name!r}; configured: {known}.", param="model")


def parse_config(raw: dict[str, Any]) -> ServeConfig:
    """A checked `ServeConfig` from plain data, as YAML or Serve's `args` give it.

    Raises:
        StartupError: names the key at fault and what would be right.
    """
    try:
        config = msgspec.convert(raw, ServeConfig)
    except msgspec.ValidationError as error:
        raise StartupError(f"The configuration is not valid: {error}.") from error
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
        if tier.decode.num_replicas == 0:
            raise StartupError(
                f"Tier {tier.name!r} has no decode worker; set decode.num_replicas to at least 1.",
                param="decode",
            )
    return config
