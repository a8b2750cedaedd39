"""Which workers are on which GPUs, for what there is and what was asked."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.capacity.device_plan import DevicePlan, plan_devices, unsized_tiers
from disagg.config import EngineConfig, PoolConfig, ServeConfig
from disagg.config_checks import parse_config
from disagg.devices import Device, Gpus
from disagg.errors import StartupError

GB = 10**9


def machine(*free_gb: float, total_gb: float = 80) -> Gpus:
    """One whose GPUs have so much free memory."""
    devices = [
        Device(str(index), "NVIDIA H100", int(total_gb * GB), int(free * GB))
        for index, free in enumerate(free_gb)
    ]
    return Gpus(tuple(devices))


def plan(gpus: Gpus, *tiers: dict[str, Any], **rest: Any) -> DevicePlan:
    named = [{"model": "m" * number, **tier} for number, tier in enumerate(tiers or [{}], start=1)]
    raw = {"tiers": named, "cluster_key": "key", **rest}
    config = parse_config(raw)
    return plan_devices(config, gpus, unsized_tiers(raw, config))


def pools_of(config: ServeConfig) -> list[tuple[int, float | None, int, float | None]]:
    return [
        (
            tier.prefill.num_replicas,
            tier.prefill.num_gpus,
            tier.decode.num_replicas,
            tier.decode.num_gpus,
        )
        for tier in config.tiers
    ]


def test_each_worker_has_a_gpu_for_itself() -> None:
    asked = {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}}
    found = plan(machine(*[80] * 8), asked)
    assert pools_of(found.config) == [(2, 1, 2, 1)]
    assert found.config.tiers[0].engine.device == "cuda"
    assert found.device_ids == ["0", "1", "2", "3"]
    assert found.line == "devices: 2 m-prefill, 2 m-decode on GPU 0, 1, 2, 3 of 8 (NVIDIA H100)"


def test_one_gpu_has_one_worker_that_does_both() -> None:
    found = plan(machine(80))
    assert pools_of(found.config) == [(0, 1, 1, 1)]
    assert "1 m-decode on GPU 0 of 1" in found.line and "decode workers do both" in found.line


def test_what_was_asked_for_is_not_made_less() -> None:
    asked = {"prefill": {"num_replicas": 1}, "decode": {"num_replicas": 2}}
    with pytest.raises(StartupError) as refused:
        plan(machine(80, 80), asked)
    said = refused.value.message
    assert "2 m-decode" in said and "1 m-prefill" in said
    assert "need 3 GPUs, and this machine has 2." in said
    assert "--num-gpus-per-worker 0.5" in said and "--device cpu" in said


def test_the_largest_model_is_the_last_to_lose_its_prefill_pool() -> None:
    found = plan(machine(80, 80, 80), {}, {})
    assert pools_of(found.config) == [(0, 1, 1, 1), (1, 1, 1, 1)]
    assert pools_of(plan(machine(80, 80), {}, {}).config) == [(0, 1, 1, 1)] * 2
    with pytest.raises(StartupError, match=r"need 2 GPUs, and this machine has 1\."):
        plan(machine(80), {}, {})


def test_workers_share_a_gpu_where_that_is_asked_for() -> None:
    shared = {"prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.5}}
    found = plan(machine(80), shared)
    assert pools_of(found.config) == [(1, 0.5, 1, 0.5)] and found.device_ids == ["0"]
    assert "1 m-prefill (0.5 of a GPU each)" in found.line
    three = {"prefill": {"num_gpus": 0.3}, "decode": {"num_gpus": 0.7, "num_replicas": 2}}
    with pytest.raises(StartupError, match=r"need 1\.7 GPUs, and this machine has 1\."):
        plan(machine(80), {**three, "prefill": {"num_gpus": 0.3, "num_replicas": 1}})
    assert plan(machine(80, 80), three).device_ids == ["0", "1"]


def test_a_worker_of_several_ranks_has_as_many_gpus() -> None:
    of_two = {"engine": {"tensor_parallel_size": 2}}
    found = plan(machine(*[80] * 5), of_two)
    assert pools_of(found.config) == [(1, 2, 1, 2)]
    assert found.device_ids == ["0", "1", "2", "3"]
    assert "1 m-prefill (2 GPUs each), 1 m-decode (2 GPUs each) on GPU 0, 1, 2, 3" in found.line
    assert found.config.tiers[0].for_role("decode").engine.gpu_memory_utilization == 0.9
    assert pools_of(plan(machine(80, 80), of_two).config) == [(0, 2, 1, 2)]
    asked = {**of_two, "prefill": {"num_replicas": 1}, "decode": {"num_replicas": 1}}
    with pytest.raises(
        StartupError, match=r"need 4 GPUs, and this machine has 3\..*-parallel-size"
    ):
        plan(machine(80, 80, 80), asked)
    with pytest.raises(StartupError, match=r"need 2 GPUs, and this machine has 1\."):
        plan(machine(80), of_two)
    with pytest.raises(StartupError, match=r"size = 2, so .* has 2 GPUs, and num_gpus is 0\.5;"):
        plan(machine(80), {**of_two, "decode": {"num_gpus": 0.5}})
    with pytest.raises(StartupError, match=r"size = 1, so .* has 1 GPU, and num_gpus is 2;"):
        plan(machine(80), {"decode": {"num_gpus": 2}})


def test_pools_may_have_workers_of_unlike_sizes() -> None:
    unlike = {"prefill": {"tensor_parallel_size": 2}, "decode": {"tensor_parallel_size": 4}}
    found = plan(machine(*[80] * 8), unlike)
    assert pools_of(found.config) == [(1, 2, 1, 4)]
    assert "1 m-prefill (2 GPUs each)" in found.line and "1 m-decode (4 GPUs each)" in found.line
    assert found.device_ids == ["0", "1", "2", "3", "4", "5"]
    tier = found.config.tiers[0]
    sizes = [tier.for_role(role).engine.tensor_parallel_size for role in ("prefill", "decode")]
    assert sizes == [2, 4]
    half = {"engine": {"tensor_parallel_size": 2}, "decode": {"tensor_parallel_size": 1}}
    assert pools_of(plan(machine(*[80] * 3), half).config) == [(1, 2, 1, 1)]
    asked = {"prefill": {**unlike["prefill"], "num_replicas": 1}, "decode": unlike["decode"]}
    with pytest.raises(StartupError, match=r"need 6 GPUs, and this machine has 5\."):
        plan(machine(*[80] * 5), asked)
    with pytest.raises(StartupError, match=r"size = 4, so each of its decode .* num_gpus is 2;"):
        plan(machine(*[80] * 8), {"decode": {"tensor_parallel_size": 4, "num_gpus": 2}})


def test_pools_are_planned_at_their_largest() -> None:
    asked = {
        "prefill": {"num_replicas": 2},
        "decode": {"autoscaling": {"max_replicas": 3}},
    }
    assert len(plan(machine(*[80] * 5), asked).device_ids) == 5
    with pytest.raises(StartupError, match=r"need 5 GPUs, and this machine has 4\."):
        plan(machine(*[80] * 4), asked)
    assert len(plan(machine(*[80] * 4), asked, max_num_workers=4).device_ids) == 4


def test_a_gpu_that_others_fill_is_left_out() -> None:
    found = plan(machine(3, 80, 80))
    assert found.device_ids == ["1", "2"]
    assert found.gpu_name == "NVIDIA H100" and plan(Gpus()).gpu_name == ""
    with pytest.raises(StartupError) as refused:
        plan(machine(3, 80), {"prefill": {"num_replicas": 1}})
    said = refused.value.message
    assert "GPU 0 (3.0 of 80.0 GB are free)" in said and "needs 90%" in said
    # A share claims less, and so does a lower gpu_memory_utilization.
    assert plan(machine(40), {"engine": {"gpu_memory_utilization": 0.5}}).device_ids == ["0"]
    half = {"prefill": {"num_replicas": 0}, "decode": {"num_gpus": 0.5}}
    assert plan(machine(40), half).device_ids == ["0"]


def test_without_gpus_workers_are_on_the_cpu() -> None:
    found = plan(Gpus())
    assert pools_of(found.config) == [(1, 0, 1, 0)]
    assert found.config.tiers[0].engine.device == "cpu"
    assert found.line == "devices: CPU (this machine has no GPU)"
    on_cpu = plan(machine(80), {"engine": {"device": "cpu"}})
    assert pools_of(on_cpu.config) == [(1, 0, 1, 0)] and on_cpu.line == "devices: CPU"


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"engine": {"device": "cuda"}}, "This machine has no GPU"),
        ({"prefill": {"num_gpus": 1}}, "This machine has no GPU"),
        ({"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 0}}, "Give both pools GPUs"),
        (
            {"engine": {"device": "cuda"}, "prefill": {"num_gpus": 0}, "decode": {"num_gpus": 0}},
            "all would open the first one",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(tier: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        plan(Gpus(), tier)


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_serve_from_the_cpu() -> None:
    broken = Gpus(problem="torch 2.11 cannot use the driver 470.1.")
    with pytest.raises(StartupError, match=r"driver 470\.1.*--device cpu"):
        plan(broken)
    assert plan(broken, {"engine": {"device": "cpu"}}).line == "devices: CPU"


def test_gpus_that_others_hold_are_not_planned_with() -> None:
    cluster = Gpus((Device(""),) * 2, where="the cluster", num_held=6)
    assert plan(cluster).line == "devices: 1 m-prefill, 1 m-decode on 2 of 2 GPUs"
    with pytest.raises(StartupError, match="the cluster has 2 free, and 6 that others hold"):
        plan(cluster, {"prefill": {"num_replicas": 3}})


def test_more_than_one_gpu_for_a_worker_is_refused() -> None:
    with pytest.raises(StartupError, match="num_gpus"):
        plan(machine(80, 80), {"prefill": {"num_gpus": 2}})
    assert PoolConfig().num_gpus is None and EngineConfig().device == "auto"
