"""A fleet in this process: its configuration, and its life."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from disagg.batch.ask import Patience
from disagg.config import EngineConfig, ServeConfig
from disagg.config_checks import parse_config
from disagg.errors import StartupError
from disagg.local import LocalCluster, running
from disagg.models.hub import fetch_model

NUM_AHEAD = 2  # requests that are sent, for each place in a batch
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


@asynccontextmanager
async def own_fleet(config: ServeConfig) -> AsyncIterator[LocalCluster]:
    """The fleet in this process, after its models were downloaded. Raises `StartupError`."""
    for tier in config.tiers:
        for named in tier.models:
            await asyncio.to_thread(fetch_model, *named, _log)
    async with running(config) as cluster:
        yield cluster


def num_ahead(cluster: LocalCluster) -> int:
    """The number of requests to send at a time, so that no place in a batch waits for the next."""
    return NUM_AHEAD * max(1, sum(worker.record.max_num_seqs for worker in cluster.workers))


@asynccontextmanager
async def answering(
    models: Sequence[str], settings: Mapping[str, Any]
) -> AsyncIterator[tuple[Patience, int]]:
    """Who answers batch work with models in this process, and how many requests at a time."""
    async with own_fleet(local_config(models, 0, 1, settings)) as cluster:
        yield Patience(cluster.post), num_ahead(cluster)


def _log(event: str, text: str, **fields: Any) -> None:
    log.info("%s", text)
