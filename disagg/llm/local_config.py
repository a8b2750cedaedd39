"""The configuration of a fleet in this process."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from disagg.config import EngineConfig, ServeConfig
from disagg.config_checks import parse_config
from disagg.errors import StartupError
from disagg.models.hub import fetch_model

NO_DEADLINE_S = 30 * 86_400.0  # of requests: nobody waits for them but this program

log = logging.getLogger("disagg.llm")

OF_MODEL = (
    "revision",
    "served_model_name",
    "chat_template",
    "lora_modules",
    "tool_call_parser",
    "reasoning_parser",
)


def local_config(
    models: Sequence[str], num_prefill: int, num_decode: int, settings: Mapping[str, Any]
) -> ServeConfig:
    """A fleet without SLOs and limits of time.

    Args:
        settings: of `EngineConfig`, and those of `TierConfig` that are in `OF_MODEL`.

    Raises:
        StartupError: a setting is wrong, or there is no such setting.
    """
    unknown = settings.keys() - set(EngineConfig.__struct_fields__) - set(OF_MODEL)
    if unknown:
        raise StartupError(
            f"There is no setting {', '.join(sorted(unknown))}. Settings are"
            f" {', '.join((*OF_MODEL, *EngineConfig.__struct_fields__))}"
            " (docs/reference/configuration.md).",
            param=min(unknown),
        )
    engine = {name: value for name, value in settings.items() if name not in OF_MODEL}
    of_model = {name: value for name, value in settings.items() if name in OF_MODEL}
    tiers = [
        {
            "model": str(model),
            "engine": engine,
            "prefill": {"num_replicas": num_prefill},
            "decode": {"num_replicas": num_decode},
            "ttft_slo_s": None,
            **of_model,
        }
        for model in models
    ]
    return parse_config(
        {
            "tiers": tiers,
            "http": {"default_timeout_s": NO_DEADLINE_S},
            # Ranks are processes, which the transport within one does not reach.
            "transport": "nixl" if settings.get("tensor_parallel_size", 1) > 1 else "local",
            "link_host": "127.0.0.1",
            "cluster_key": secrets.token_hex(32),
        }
    )


def fetch_models(config: ServeConfig) -> None:
    """Download models that are not on this machine yet. Raises `StartupError`."""
    for tier in config.tiers:
        for named in tier.models:
            fetch_model(*named, lambda event, text, **fields: log.info("%s", text))
