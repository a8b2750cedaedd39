"""Which GPU every worker opens: on a machine whose GPUs are stood in for, all else being real."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.served import Served, served
from tests.e2e.test_bad_start import refusal
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STAND_IN = Path(__file__).parent / "gpu_stand_in"
FLAGS = ["--dtype", "float32", "--num-threads", "1", "--no-redis"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def machine(*free_gb: int, **more: str) -> dict[str, str]:
    """The environment of one whose GPUs have 80 GB each, and so many free."""
    paths = [str(STAND_IN), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(STAND_IN), os.environ["PATH"]]),
        "DISAGG_TEST_GPUS": ",".join(map(str, free_gb)),
        **more,
    }


class Opened:
    """What the workers of a server opened: pool and GPU of each, and the GB that they claim."""

    def __init__(self, server: Served, directory: Path) -> None:
        self.server = server
        each_one = [json.loads(file.read_text()) for file in directory.glob("*.json")]
        self.gpus = sorted((each["pool"], each["gpu"]) for each in each_one)
        self.claims = [each["claim_nbytes"] / 1e9 for each in each_one]


@contextmanager
def running(directory: Path, environment: dict[str, str], *arguments: str) -> Iterator[Opened]:
    opened = directory / "opened"
    opened.mkdir(exist_ok=True)
    environment = {**environment, "DISAGG_TEST_OPENED": str(opened)}
    with served([*arguments, *FLAGS], directory, environment) as server:
        yield Opened(server, opened)


def test_every_worker_opens_a_gpu_of_its_own(model: str, tmp_path: Path) -> None:
    """Of eight GPUs, the first of which another process fills."""
    free = machine(3, *[80] * 7)
    with running(tmp_path, free, model, "--prefill", "2", "--decode", "2") as found:
        pools = ["tiny-decode"] * 2 + ["tiny-prefill"] * 2
        assert [pool for pool, _ in found.gpus] == pools
        assert sorted(gpu for _, gpu in found.gpus) == [1, 2, 3, 4]
        assert found.claims == [72.0] * 4
        said = found.server.log.read_text()
        assert "2 tiny-prefill, 2 tiny-decode on GPU 1, 2, 3, 4 of 8" in said


def test_one_gpu_has_one_worker_that_does_both(model: str, tmp_path: Path) -> None:
    with running(tmp_path, machine(80), model) as found:
        assert found.gpus == [("tiny-decode", 0)] and found.claims == [72.0]
        body = {"model": "tiny", "prompt": "one", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{found.server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] > 0


def test_workers_that_share_a_gpu_share_its_memory(model: str, tmp_path: Path) -> None:
    share = ["--num-gpus-per-worker", "0.5"]
    with running(tmp_path, machine(80), model, *share) as found:
        assert found.gpus == [("tiny-decode", 0), ("tiny-prefill", 0)]
        assert found.claims == [36.0, 36.0]


def test_workers_use_the_gpus_of_a_running_cluster(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The command itself is on a machine without one, and Ray is told to hide none."""
    not_hidden = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    directory = tmp_path_factory.mktemp("ray")
    opened = {"DISAGG_TEST_OPENED": str(directory / "opened")}
    here = {"RAY_AUTH_MODE": "disabled"}
    with ray_nodes(
        directory, (), num_gpus=2, environment=machine(80, 80, **opened, **not_hidden)
    ) as nodes:
        address = ["--ray-address", f"127.0.0.1:{nodes.gcs_port}"]
        said = refusal(model, *address, "--prefill", "2", environment=here)
        assert "2 tiny-prefill, 1 tiny-decode need 3 GPUs, and the cluster has 2." in said
        with running(directory, here, model, *address) as found:
            assert [pool for pool, _ in found.gpus] == ["tiny-decode", "tiny-prefill"]
            assert sorted(gpu for _, gpu in found.gpus) == [0, 1]
            assert "on 2 of 2 GPUs" in found.server.log.read_text()


def test_fewer_gpus_than_workers_are_refused(model: str) -> None:
    said = refusal(model, "--prefill", "1", "--decode", "2", environment=machine(80, 80))
    assert "1 tiny-prefill, 2 tiny-decode need 3 GPUs, and this machine has 2." in said
    assert "--num-gpus-per-worker 0.5" in said


def test_a_driver_that_is_too_old_is_refused(model: str) -> None:
    too_old = machine(80, DISAGG_TEST_DRIVER_IS_TOO_OLD="1")
    said = refusal(model, environment=too_old)
    assert "CUDA 13.0" in said and "driver 535.104.05" in said and "too old" in said
    assert "--device cpu" in said


def test_what_does_not_fit_beside_the_weights_is_refused(model: str) -> None:
    share = ["--prefill", "0", "--gpu-memory-utilization", "0.001"]
    said = refusal(model, *share, environment=machine(80))
    assert "0.1 GB of its GPU" in said and "max_num_batched_tokens" in said
