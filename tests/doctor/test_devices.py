"""Each verdict on GPUs and their driver."""

from __future__ import annotations

import pytest

from disagg.doctor import devices
from disagg.doctor.devices import Gpu
from disagg.doctor.findings import Status

GIB = 1 << 30


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "change"),
    [
        ("", None, "ok", ""),
        ("", "13.0", "ok", ""),
        ("580.1", None, "wrong", "pip install torch"),
        ("470.82", "13.0", "wrong", "a driver for CUDA 13.0 or later"),
    ],
)
def test_no_gpu(driver: str, cuda: str | None, status: Status, change: str) -> None:
    finding = devices.no_gpu(driver, "2.13.0", cuda)
    assert finding.status == status
    assert change in finding.change
    assert driver in finding.found


@pytest.mark.parametrize(
    ("free_gib", "capability", "status", "change"),
    [
        (79, (9, 0), "ok", ""),
        (40, (9, 0), "warn", "--gpu-memory-utilization 0.47"),
        (79, (7, 0), "wrong", "--device cpu"),
    ],
)
def test_gpus(free_gib: int, capability: tuple[int, int], status: Status, change: str) -> None:
    finding = devices.gpu(3, Gpu("H100", capability, free_gib * GIB, 80 * GIB))
    assert (finding.check, finding.status) == ("GPU 3", status)
    assert change in finding.change
    assert "H100" in finding.found
