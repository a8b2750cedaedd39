"""A prefix that was evicted comes back from host memory, with scales or without, and the answer is
the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.config import EngineConfig
from disagg.config_checks import parse_config
from disagg.local import LocalCluster, running
from disagg.router.worker_view import host_id
from disagg.time_model import StepTimeModel
from tests.e2e.single_engine import SingleEngine
from tests.grids import some
from tests.router.fakes import held_by
from tests.test_local_cold_tier import NUM_OTHERS, PROMPT, chat, prefix_of
from tests.tiny_model import write_tiny_model

OTHERS = [f"{number}: something else, as long as it; " * 11 for number in range(NUM_OTHERS)]
COMPUTE_S = (
    10.0  # predicted for any prompt: on a busy machine a load may take longer than computing
)
# A block that is evicted before it was copied is not saved, as it should be.
NUM_ATTEMPTS = 5


def metric(metrics: str, name: str, label: str = "") -> float:
    """Summed over workers."""
    pattern = rf"^disagg_worker_host_tier_{name}{{.*{label}.*}} (.*)$"
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))


async def comes_back(
    cluster: LocalCluster, client: httpx.AsyncClient, answers: dict[str, str]
) -> int:
    """Evict the prompt's blocks and ask again. Returns how many of its tokens were not computed."""
    names, index = prefix_of(cluster), cluster.ingress.fleet.index
    in_host = {host_id(worker.record.worker_id) for worker in cluster.workers}
    for other in OTHERS:
        assert (await chat(client, other))[0] == answers[other]
    assert set(held_by(index, names)) <= in_host, "it is still in a cache"
    text, num_cached = await chat(client, PROMPT)
    assert text == answers[PROMPT]
    return num_cached


@pytest.mark.parametrize("kv_cache_dtype", some(["float32", "int4"], ["int8", "fp8"]))
async def test_an_evicted_prefix_comes_back_from_host_memory(
    kv_cache_dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda model, num_new, num_before=0: COMPUTE_S)
    model = write_tiny_model(tmp_path / "model")
    engine = {"dtype": "float32", "num_threads": 1, "kv_cache_dtype": kv_cache_dtype}
    alone = SingleEngine(
        model, EngineConfig(dtype="float32", num_threads=1, kv_cache_dtype=kv_cache_dtype)
    )
    answers = {content: alone.chat(content, 8) for content in [PROMPT, *OTHERS]}
    tiny = {**engine, "num_gpu_blocks_override": 40, "kv_offloading_size": 0.1}
    # One worker, so that the other prompts go where the first one is cached.
    tier = {"model": str(model), "served_model_name": "tiny", "engine": tiny}
    config = parse_config(
        {
            "tiers": [{**tier, "prefill": {"num_replicas": 0}}],
            "cluster_key": "a key of this test",
            "transport": "local",
        }
    )
    async with running(config) as cluster:
        transport = httpx.ASGITransport(app=cluster.ingress.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert await chat(client, PROMPT) == (answers[PROMPT], 0)
            for _ in range(NUM_ATTEMPTS):
                if (num_cached := await comes_back(cluster, client, answers)) > 300:
                    break
            assert num_cached > 300
            metrics = (await client.get("/metrics")).text
        assert metric(metrics, "blocks_total", 'outcome="loaded"') >= num_cached // 16
        assert metric(metrics, "blocks_total", 'outcome="saved"') >= len(prefix_of(cluster))
        assert metric(metrics, "load_seconds_total") > 0.0
        assert 0.0 < metric(metrics, "bytes") <= 0.1 * 2**30
        for worker in cluster.workers:
            await worker.check()
