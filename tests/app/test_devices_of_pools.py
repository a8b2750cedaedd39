"""What Serve is told of each pool's devices."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.app import build as module
from disagg.app import worker_environment
from disagg.app.worker_environment import environment_of, with_threads
from disagg.devices import VISIBLE, Device, Gpus


def deployments_of(*tiers: dict[str, Any]) -> list[Any]:
    application: Any = module.build({"cluster_key": "a key of this test", "tiers": tiers})
    _, *workers = application._bound_deployment.init_args
    return [each._bound_deployment for each in workers]


def options_of(*tiers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each pool: what its actors ask Ray for."""
    return {each.name: each.ray_actor_options for each in deployments_of(*tiers)}


def environments_of(*tiers: dict[str, Any]) -> list[dict[str, str]]:
    """What the workers of each pool add to their environment."""
    arguments = [each.init_args for each in deployments_of(*tiers)]
    return [environment_of(config.tier(name), role) for config, name, role in arguments]


def test_pools_that_ask_for_no_gpu_see_none() -> None:
    for tier in ({}, {"prefill": {"num_gpus": 0}, "decode": {"num_gpus": 0}}):
        options = options_of({"model": "demo-small", **tier}).values()
        assert len(options) == 2
        assert all(each["num_gpus"] == 0 for each in options)
        environments = environments_of({"model": "demo-small", **tier})
        assert len(environments) == len(options)
        assert all(each[VISIBLE] == "" for each in environments)


def test_no_worker_needs_a_process_that_prepares_its_environment() -> None:
    """As Ray starts one for each actor that has a `runtime_env`."""
    tier = {"model": "demo-small", "engine": {"num_threads": 3}}
    options = options_of(tier)
    assert list(options) == ["demo-small-prefill", "demo-small-decode"]
    assert all("runtime_env" not in each for each in options.values())
    environments = environments_of(tier)
    assert len(environments) == len(options)
    for environment in environments:
        assert environment["OMP_NUM_THREADS"] == "3"
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_a_file_asks_for_stays_as_written() -> None:
    """Also without a GPU in sight: nodes with some may come when workers ask for them."""
    tier = {"model": "demo-small", "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 0.5}}
    options = options_of(tier)
    assert [each["num_gpus"] for each in options.values()] == [1, 0.5]
    environments = environments_of(tier)
    assert len(environments) == 2
    assert all(VISIBLE not in each for each in environments)


def test_files_that_say_nothing_use_the_gpus_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Gpus((Device(""),) * 3, where="the cluster")
    monkeypatch.setattr(module, "gpus_of_cluster", lambda only_free: found)
    options = options_of({"model": "demo-small"}, {"model": "demo-large"})
    assert {name: each["num_gpus"] for name, each in options.items()} == {
        "demo-small-decode": 1,
        "demo-large-prefill": 1,
        "demo-large-decode": 1,
    }


def test_a_worker_over_nodes_is_a_placement_group_with_a_bundle_for_each() -> None:
    """A number that an autoscaler asks for is of such groups."""
    engine = {"tensor_parallel_size": 16}
    decode = {"nnodes": 2, "num_gpus": 16, "num_cpus": 4, "resources": {"decode": 1}}
    tier = {"model": "demo-small", "engine": engine, "prefill": {"num_gpus": 16}, "decode": decode}
    deployments = deployments_of(tier)
    assert [each.name for each in deployments] == ["demo-small-prefill", "demo-small-decode"]
    for deployment in deployments:
        replica, asked = deployment._replica_config, deployment.ray_actor_options
        if deployment.name.endswith("prefill"):
            assert replica.placement_group_bundles is None and asked["num_gpus"] == 16
            continue
        bundle = {"CPU": 4, "GPU": 8, "decode": 1}
        assert replica.placement_group_bundles == [bundle, bundle]
        assert replica.placement_group_strategy == "STRICT_SPREAD"
        assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == (4, 8, {"decode": 1})


def test_a_worker_over_nodes_of_cpus_asks_ray_for_something() -> None:
    engine = {"tensor_parallel_size": 2, "nnodes": 2, "device": "cpu"}
    deployments = deployments_of({"model": "demo-small", "engine": engine})
    assert [each.name for each in deployments] == ["demo-small-prefill", "demo-small-decode"]
    for deployment in deployments:
        (bundle, _) = deployment._replica_config.placement_group_bundles
        assert list(bundle) == ["CPU"] and 0 < bundle["CPU"] < 0.01


def threads_of(num_nodes: int, *tiers: dict[str, Any]) -> dict[str, int | None]:
    """Number of torch threads that the configuration or `with_threads` sets for each pool."""
    found = {}
    for deployment in deployments_of(*tiers):
        config, name, role = deployment.init_args
        tier = with_threads(config, config.tier(name), role, num_nodes)
        found[deployment.name] = tier.engine.num_threads
        threads = environment_of(tier, role).get("OMP_NUM_THREADS")
        assert threads == (None if found[deployment.name] is None else str(tier.engine.num_threads))
    return found


def test_workers_of_a_kind_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of threads Ray gives one to each worker."""
    monkeypatch.setattr(worker_environment, "usable_cores", lambda: 8)
    tier: dict[str, Any] = {"model": "demo-small"}
    assert threads_of(1, tier) == {"demo-small-prefill": 4, "demo-small-decode": 4}
    scaled = {"num_replicas": 1, "autoscaling": {"max_replicas": 3}}
    four = {**tier, "decode": scaled}
    assert threads_of(1, four) == {"demo-small-prefill": 2, "demo-small-decode": 2}
    assert threads_of(3, four) == {"demo-small-prefill": 4, "demo-small-decode": 4}
    own = {**tier, "decode": {"num_cpus": 3}}
    assert threads_of(1, own) == {"demo-small-prefill": 4, "demo-small-decode": 3}
    many = {**tier, "decode": {"num_replicas": 20}}
    assert threads_of(1, many) == {"demo-small-prefill": 1, "demo-small-decode": 1}
    given = {**tier, "engine": {"num_threads": 7}}
    assert threads_of(1, given) == {"demo-small-prefill": 7, "demo-small-decode": 7}
    on_gpu = {**tier, "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}
    large = {"model": "demo-large", "prefill": {"num_gpus": 0}, "decode": {"num_gpus": 0}}
    assert set(threads_of(1, on_gpu, large).values()) == {4}
    assert set(threads_of(1, on_gpu, on_gpu | {"model": "demo-large"}).values()) == {2}
    assert set(threads_of(2, on_gpu, on_gpu | {"model": "demo-large"}).values()) == {4}
