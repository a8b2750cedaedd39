"""What Serve is told of each pool's devices."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.app import build as module
from disagg.kernels.devices import VISIBLE, Device, Gpus


def options_of(*tiers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each pool: what its actors ask Ray for."""
    application: Any = module.build({"cluster_key": "a key of this test", "tiers": tiers})
    _, *workers = application._bound_deployment.init_args
    return {
        each._bound_deployment.name: each._bound_deployment.ray_actor_options for each in workers
    }


def test_pools_that_ask_for_no_gpu_see_none() -> None:
    for tier in ({}, {"prefill": {"num_gpus": 0}, "decode": {"num_gpus": 0}}):
        for options in options_of({"model": "demo-small", **tier}).values():
            assert options["num_gpus"] == 0
            assert options["runtime_env"]["env_vars"][VISIBLE] == ""


def test_what_a_file_asks_for_stays_as_written() -> None:
    """Also without a GPU in sight: nodes with some may come when workers ask for them."""
    tier = {"model": "demo-small", "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 0.5}}
    options = options_of(tier)
    assert [each["num_gpus"] for each in options.values()] == [1, 0.5]
    assert all(VISIBLE not in each["runtime_env"]["env_vars"] for each in options.values())


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
