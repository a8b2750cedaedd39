"""Workers whose ranks are on two nodes, without Ray: the nodes are addresses of this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from disagg import local
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.config_checks import parse_config
from disagg.errors import EngineFailed, StartupError
from disagg.rank_messages import RankStart
from disagg.worker.other_rank import LocalRank, Rank, RemoteRank
from disagg.worker.parts import Parts, build_parts
from disagg.worker.ranks import Ranks
from tests.e2e.single_engine import SingleEngine
from tests.kvtransfer.memory import Memory
from tests.links.fakes import until
from tests.rank_nodes import FakeRankNodes, rank_nodes
from tests.test_local import ENGINE, LONG, body, chat, has_stepped, text
from tests.tiny_model import tiny_parts


@pytest.fixture
def nodes() -> Iterator[FakeRankNodes]:
    with rank_nodes() as nodes:
        yield nodes


def config(model: Path) -> ServeConfig:
    """Prefill workers of one rank, decode workers of two: one on each node."""
    tier = TierConfig(
        model=str(model),
        engine=ENGINE,
        prefill=PoolConfig(num_replicas=1),
        decode=PoolConfig(num_replicas=1, tensor_parallel_size=2, nnodes=2),
    )
    return ServeConfig(tiers=(tier,), transport="nixl", cluster_key="key", transfer_interface="lo")


async def test_text_is_one_engines_text_until_the_rank_of_another_node_is_killed(
    model: Path, nodes: FakeRankNodes
) -> None:
    reference, build = SingleEngine(model, ENGINE), tiny_parts()

    def build_over_nodes(config: ServeConfig, tier: TierConfig, *rest: Any) -> Parts:
        return build(config, tier, *rest, nodes=nodes if tier.engine.nnodes > 1 else None)

    async with (
        local.running(config(model), build_over_nodes) as running,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(running.ingress.app), base_url="http://local", timeout=60
        ) as client,
    ):
        prefill, decode = running.workers
        assert decode._ranks is not None
        decode._ranks.may_hang = False  # else a busy machine may end this process
        for content, temperature in (("short", 0.0), (LONG, 0.0), ("again: " + LONG, 1.0)):
            answer = await chat(client, content, temperature=temperature, seed=7)
            assert text(answer) == reference.chat(content, 24, temperature=temperature, seed=7)
        pulls = decode._core.status().pulls
        assert sum(each.num_ok for each in pulls), "nothing was pulled"
        assert not sum(each.num_failed + each.num_torn for each in pulls), pulls

        num_steps = decode._thread.num_turns
        asked = client.post(
            "/v1/chat/completions", json=body("last: " + LONG, 100, ignore_eos=True)
        )
        async with asyncio.TaskGroup() as tasks:
            moving = tasks.create_task(asked)
            await until(lambda: has_stepped(decode) and decode._thread.num_turns > num_steps + 5)
            (lost,) = nodes.processes
            lost.kill()
        moved = moving.result()
        assert text(moved.json()) == reference.chat("last: " + LONG, 100, ignore_eos=True)
        decisions = running.ingress.dispatcher.decision(moved.json()["id"])
        assert any("worker_lost" in each.because for each in decisions), decisions
        await until(lambda: decode._thread.failed is not None)
        with pytest.raises(EngineFailed):
            decode.check_health()
        prefill.check_health()


def parts_of(config: ServeConfig, nodes: FakeRankNodes | None) -> Parts:
    return build_parts(config, config.tiers[0].for_role("decode"), "worker", 1, nodes=nodes)


def test_a_start_that_fails_on_another_node_names_rank_and_node(
    model: Path, nodes: FakeRankNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"^rank 1 of 2 on 127\.0\.0\.2 .* exit status 1"):
        parts_of(config(model), nodes)


def test_what_a_rank_on_another_node_says_when_it_cannot_start_is_heard(
    model: Path, nodes: FakeRankNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is on the first node only."""
    started = RemoteRank.__init__

    def elsewhere(rank: RemoteRank, start: RankStart, *rest: Any) -> None:
        tier = msgspec.structs.replace(start.tier, model="/nowhere/tiny")
        started(rank, msgspec.structs.replace(start, tier=tier), *rest)

    monkeypatch.setattr(RemoteRank, "__init__", elsewhere)
    said = r"^rank 1 of 2 on 127\.0\.0\.2 cannot start: There is no model directory '/nowhere"
    with pytest.raises(StartupError, match=said):
        parts_of(config(model), nodes)


def test_a_rank_with_another_model_is_refused(model: Path) -> None:
    def rank(layout: str) -> Rank:
        made = LocalRank.__new__(LocalRank)
        made.name, made._peer = "rank 1 of 2 on b", Memory("worker.1", layout=layout).peer()
        return made

    ranks = Ranks.__new__(Ranks)
    ranks.others = [rank("ours")]
    ranks.check_layout("ours")
    ranks.others.append(rank("theirs"))
    with pytest.raises(StartupError, match=r"rank 1 of 2 on b stores KV as 'theirs', .* 'ours'"):
        ranks.check_layout("ours")


def test_what_one_process_cannot_be_is_refused(model: Path) -> None:
    with pytest.raises(StartupError, match="nnodes = 2, which needs Ray"):
        parts_of(config(model), None)
    raw = msgspec.to_builtins(config(model))
    raw["tiers"][0]["decode"]["nnodes"] = 3
    with pytest.raises(StartupError, match="2 ranks cannot be divided evenly over 3 nodes"):
        parse_config(raw)
