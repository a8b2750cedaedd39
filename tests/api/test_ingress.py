"""When an ingress says that it is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from disagg.api.ingress import IngressCore
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.messages import WorkerStatus
from tests.links.fakes import make_record
from tests.tiny_model import write_tiny_model

IDLE = WorkerStatus(num_blocks=64, num_free_blocks=64)
TIERS = ("small", "large")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def ingress(model: Path, num_prefill: int = 1) -> IngressCore:
    tiers = tuple(
        TierConfig(
            model=str(model), served_model_name=name, prefill=PoolConfig(num_replicas=num_prefill)
        )
        for name in TIERS
    )
    return IngressCore(ServeConfig(tiers=tiers, cluster_key="key"), "ingress-0")


def sync(core: IngressCore, pool: str) -> None:
    name, role = pool.split("-")
    core.fleet.worker_synced(make_record(pool, model=name, role=role), [], IDLE)


def test_ready_when_a_worker_of_each_pool_is_synced(model: Path) -> None:
    core = ingress(model)
    pools = [f"{name}-{role}" for name in TIERS for role in ("prefill", "decode")]
    for pool in pools:
        assert not core.readiness().ready and pool in core.readiness().reason
        sync(core, pool)
    assert core.readiness().ready and not core.readiness().reason


def test_a_pool_that_dies_later_is_missed_only_if_nobody_takes_its_work(model: Path) -> None:
    core = ingress(model)
    for name in TIERS:
        sync(core, f"{name}-prefill")
        sync(core, f"{name}-decode")
    assert core.readiness().ready
    core.fleet.worker_lost("small-prefill")
    core.fleet.worker_lost("large-decode")
    assert core.readiness().ready
    core.fleet.worker_stepped("large-prefill", (), msgspec.structs.replace(IDLE, accepting=False))
    assert not core.readiness().ready and core.readiness().reason.endswith("for large")


def test_a_pool_without_replicas_is_not_waited_for(model: Path) -> None:
    core = ingress(model, num_prefill=0)
    for name in TIERS:
        sync(core, f"{name}-decode")
    assert core.readiness().ready


async def test_an_ingress_does_not_wait_for_a_dead_pool_for_ever(model: Path) -> None:
    core = ingress(model)
    assert not await core.wait_ready(0.01)
    for name in TIERS:
        sync(core, f"{name}-decode")
    assert core.readiness().ready, "the decode workers can do it all"


async def test_waiting_ends_as_soon_as_all_pools_are_there(model: Path) -> None:
    core = ingress(model)
    waiting = asyncio.create_task(core.wait_ready(60))
    for name in TIERS:
        sync(core, f"{name}-prefill")
        sync(core, f"{name}-decode")
    assert await waiting
