"""A machine whose GPUs are stood in for, all else being real: which GPU a worker opens.

A GPU for every worker is in `test_cascade.py`, workers that share one in `test_lifecycle.py`, and
GPUs of a running cluster in `test_running_cluster.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.command import STAND_IN, Command, refusal_of, with_stand_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def machine(*free_gb: int, **more: str) -> dict[str, str]:
    """The environment of one whose GPUs have 80 GB each, and so many free."""
    return {
        "PYTHONPATH": with_stand_in(),
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


def test_a_driver_that_is_too_old_is_refused(tmp_path: Path) -> None:
    too_old = machine(80, DISAGG_TEST_DRIVER_IS_TOO_OLD="1")
    said = refusal_of(Command("demo-small", tmp_path, too_old))
    assert "CUDA 13.0" in said and "driver 535.104.05" in said and "too old" in said
    assert "--device cpu" in said


def test_what_does_not_fit_beside_the_weights_is_refused(tmp_path: Path) -> None:
    share = "demo-small --prefill 0 --gpu-memory-utilization 0.001"
    said = refusal_of(Command(share, tmp_path, machine(80)))
    assert "0.1 GB of its GPU" in said and "max_num_batched_tokens" in said
