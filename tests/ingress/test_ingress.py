"""When an ingress says that it is ready, and what waits in it."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.config import (
    AutoscalingConfig,
    HttpConfig,
    PoolConfig,
    ServeConfig,
    TenantConfig,
    TierConfig,
)
from disagg.ingress.core import IngressCore
from disagg.ingress.decisions import Decision
from disagg.messages import GenerateRequest, WorkerStatus
from disagg.router.load_report import read_pool_state
from disagg.router.route import Route
from tests.api.apps import http_client, until
from tests.links.fakes import make_record
from tests.router.fakes import make_request

IDLE = WorkerStatus(num_blocks=64, num_free_blocks=64)
TIERS = ("small", "large")


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


def test_goodput_is_counted_by_an_slo_that_requests_need_not_have(model: Path) -> None:
    """A model without a TPOT SLO would otherwise have no request that meets it."""
    core = ingress(model)
    tier = core._config.tiers[0]
    assert tier.tpot_slo_s is None
    assert core._metrics.slo_s["small"] == (tier.ttft_slo_s, tier.tpot_goal_s)


@pytest.mark.parametrize(("own_s", "expected_s"), [(0.0, None), (2.0, 2.0), (math.inf, math.inf)])
def test_a_request_has_its_own_slo_or_that_of_its_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, own_s: float, expected_s: float | None
) -> None:
    core = ingress(model)
    tier = core._config.tiers[0]
    sent: list[GenerateRequest] = []
    monkeypatch.setattr(core.dispatcher, "generate", lambda request, _: sent.append(request))
    core._dispatch(make_request(model="small", ttft_slo_s=own_s), lambda delta: None)
    assert sent[0].ttft_slo_s == (tier.ttft_limit_s if expected_s is None else expected_s)


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


def test_a_pool_that_is_scaled_to_zero_is_not_waited_for(model: Path) -> None:
    asleep = PoolConfig(autoscaling=AutoscalingConfig(min_replicas=0, max_replicas=1))
    tier = TierConfig(model=str(model), served_model_name="small", decode=asleep)
    core = IngressCore(ServeConfig(tiers=(tier,), cluster_key="key"), "ingress-0")
    assert not core.readiness().ready and "small-prefill" in core.readiness().reason
    sync(core, "small-prefill")
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


async def test_what_waits_is_shown_and_who_asked_can_see_why(model: Path) -> None:
    core = ingress(model, num_prefill=0)
    busy = msgspec.structs.replace(IDLE, num_uncomputed_tokens=50_000, num_waiting=9)
    for name in TIERS:
        sync(core, f"{name}-decode")
        core.fleet.worker_stepped(f"{name}-decode", (), busy)
    async with http_client(core.app) as client:
        body = {"model": "small", "prompt": [5, 6, 7], "max_tokens": 1, "timeout": 60}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: bool(core.admission_queue.num_by_tenant()))
        shown = (await client.get("/metrics")).text
        assert 'disagg_queue_num_requests{tenant="default"} 1.0' in shown
        assert read_pool_state([core.load()], "small", "decode").num_queued_tokens == 50_000 + 3
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not core.admission_queue.num_by_tenant())
        shown = (await client.get("/metrics")).text
        assert 'disagg_queue_num_requests{tenant="default"} 0.0' in shown
        assert "disagg_queue_bytes 0.0" in shown
        refused = await client.post("/v1/completions", json=body | {"timeout": 1.0})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 1
    await core.close()


async def test_two_ingresses_keep_one_limit_through_redis(model: Path, tmp_path: Path) -> None:
    tiers = (TierConfig(model=str(model), served_model_name="small"),)
    with EmbeddedRedis(tmp_path) as redis:
        config = ServeConfig(
            tiers=tiers,
            cluster_key="key",
            redis_url=redis.url,
            http=HttpConfig(api_keys={"alice": "key-of-alice", "bob": "key-of-bob"}),
            tenants={"alice": TenantConfig(requests_per_minute=3)},
        )
        one, two = (IngressCore(config, name) for name in ("one", "two"))
        alice = {"authorization": "Bearer key-of-alice"}
        body = {"tokens": [5]}
        async with http_client(one.app) as first, http_client(two.app) as second:
            for _ in range(2):
                answer = await first.post("/detokenize", json=body, headers=alice)
                assert answer.status_code == 200
            while two._limits.remaining("alice")["requests"].remaining > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            statuses = [
                (await second.post("/detokenize", json=body, headers=alice)).status_code
                for _ in range(2)
            ]
            assert statuses == [200, 429]
            bob = {"authorization": "Bearer key-of-bob"}
            assert (await second.post("/detokenize", json=body, headers=bob)).status_code == 200
        await asyncio.gather(one.close(), two.close())


async def test_a_tenant_sees_only_its_own_requests(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tenants may also use the same id: then neither sees the other's route."""
    tiers = (TierConfig(model=str(model), served_model_name="small"),)
    keys = {"alice": "key-of-alice", "bob": "key-of-bob"}
    config = ServeConfig(tiers=tiers, cluster_key="key", http=HttpConfig(api_keys={**keys}))
    core = IngressCore(config, "ingress-0")
    route = Route(None, "small-decode", 0.1, 0, (), "")
    of_alice, of_bob = (Decision(0.0, route, 3, "", tenant) for tenant in keys)
    known = {"alices": (of_alice,), "both": (of_alice, of_bob)}
    monkeypatch.setattr(core.dispatcher, "decision", lambda request_id: known.get(request_id, ()))
    statuses = {}
    async with http_client(core.app) as client:
        for tenant, key in keys.items():
            for request_id in ("alices", "both", "nobodys"):
                reply = await client.get(
                    f"/debug/requests/{request_id}", headers={"authorization": f"Bearer {key}"}
                )
                statuses[tenant, request_id] = reply.status_code
    assert statuses.pop(("alice", "alices")) == 200
    assert set(statuses.values()) == {404}
    await core.close()


def test_it_warns_once_when_the_fleet_outgrows_the_index(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = ingress(model)
    room = core._index.max_num_blocks
    core._check_index(room)
    assert not caplog.messages
    for _ in range(3):
        core._check_index(3 * room)
    (message,) = caplog.messages
    assert "Multiply prefix_index_nbytes by 3.0" in message
    core._check_index(room)
    core._check_index(room + 1)
    assert len(caplog.messages) == 2
    assert "by 1.1" in caplog.messages[1]  # not 1.0, which would change nothing
