"""Which GPU every worker opens: on a machine whose GPUs are stood in for, all else being real.

However a server ends, nothing is left of it that could hold a GPU. GPUs of a running cluster are in
`test_running_cluster.py`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.command import LONG, NUM_STREAMS, Command, Streams, ask
from tests.e2e.test_bad_start import refusal
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STAND_IN = Path(__file__).parent / "gpu_stand_in"
FLAGS = ["--dtype", "float32", "--num-threads", "1", "--no-redis", "--no-haproxy"]


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

    def __init__(self, directory: Path) -> None:
        each_one = [json.loads(file.read_text()) for file in directory.glob("*.json")]
        self.gpus = sorted((each["pool"], each["gpu"]) for each in each_one)
        self.claims = [each["claim_nbytes"] / 1e9 for each in each_one]


@contextmanager
def started(
    home: Path, environment: dict[str, str], arguments: str, status: int
) -> Iterator[tuple[Command, Opened]]:
    """Until the block ends it: with this status, and nothing may be left."""
    opened = home / "opened"
    opened.mkdir()
    environment = {**environment, "DISAGG_TEST_OPENED": str(opened)}
    command = Command(
        f"demo-small --max-num-seqs 32 {' '.join(FLAGS)} {arguments}", home, environment
    )
    try:
        command.wait_ready()
        yield command, Opened(opened)
    finally:
        assert command.ended() == status
    command.assert_nothing_left()


def test_every_worker_opens_a_gpu_of_its_own(tmp_path: Path) -> None:
    """Of eight GPUs, the first of which another process fills. A killed command takes all along."""
    free = machine(3, *[80] * 7)
    with started(tmp_path, free, "--prefill 1 --decode 2", -signal.SIGKILL) as (command, found):
        pools = ["demo-small-decode"] * 2 + ["demo-small-prefill"]
        assert [pool for pool, _ in found.gpus] == pools
        assert sorted(gpu for _, gpu in found.gpus) == [1, 2, 3]
        assert found.claims == [72.0] * 3
        said = command.output()
        assert "1 demo-small-prefill, 2 demo-small-decode on GPU 1, 2, 3 of 8" in said
        command.process.kill()


def test_one_gpu_has_one_worker_that_does_both(tmp_path: Path) -> None:
    """A node that dies ends the command with a sentence: a raylet ends when its agent does."""
    with started(tmp_path, machine(80), "", 1) as (command, found):
        assert found.gpus == [("demo-small-decode", 0)] and found.claims == [72.0]
        assert ask(command.url).json()["usage"]["completion_tokens"] > 0
        command.one("ray::DashboardAgent").kill()
    (line,) = command.events("broken")
    assert "Ray's raylet process died" in line["message"]
    command.assert_only_own_lines()


def test_workers_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    """A second signal ends them at once, in the middle of streams."""
    share = "--num-gpus-per-worker 0.5 --host :: --insecure"
    with started(tmp_path, machine(80), share, 128 + signal.SIGTERM) as (command, found):
        assert found.gpus == [("demo-small-decode", 0), ("demo-small-prefill", 0)]
        assert found.claims == [36.0, 36.0]
        streams = Streams(command.url, NUM_STREAMS, LONG)
        command.process.send_signal(signal.SIGTERM)
        command.wait_for("stopping")
        command.process.send_signal(signal.SIGTERM)
    ends = streams.wait()
    assert len(ends) == NUM_STREAMS
    assert set(ends) != {"data: [DONE]"}, "they were waited for"
    command.assert_only_own_lines()


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
