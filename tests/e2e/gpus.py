"""A machine whose GPUs are stood in for, all else being real: which GPU a worker opens.

A GPU for every worker is in `test_cascade.py`, workers that share one in `test_lifecycle.py`, and
GPUs of a running cluster in `test_running_cluster.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from tests.e2e.command import STAND_IN


def machine(*free_gb: int) -> dict[str, str]:
    """The environment of one whose GPUs have 80 GB each, and so many free."""
    return {
        "PATH": os.pathsep.join([str(STAND_IN), os.environ["PATH"]]),
        "DISAGG_TEST_GPUS": ",".join(map(str, free_gb)),
    }


class Opened:
    """What the running workers of a server opened: pool and GPU of each, and the GB that they
    claim."""

    def __init__(self, directory: Path) -> None:
        files = [file for file in directory.glob("*.json") if psutil.pid_exists(int(file.stem))]
        each_one = [json.loads(file.read_text()) for file in files]
        self.gpus = sorted((each["pool"], each["gpu"]) for each in each_one)
        self.claims = [each["claim_nbytes"] / 1e9 for each in each_one]
