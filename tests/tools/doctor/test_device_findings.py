"""Each verdict on GPUs."""

from __future__ import annotations

import pytest

from disagg.devices import Device, Gpus
from disagg.tools.doctor.machine import check_gpus, compiler
from disagg.tools.doctor.report import Status

GIB = 1 << 30


def device(free_gib: int | None) -> Device:
    return Device("3", "H100", 80 * GIB, None if free_gib is None else free_gib * GIB)


@pytest.mark.parametrize(
    ("gpus", "check", "status", "change"),
    [
        (Gpus(), "CUDA", "ok", ""),
        (Gpus(problem="The driver is too old."), "CUDA", "wrong", "--device cpu"),
        (Gpus((device(79),)), "GPU 3", "ok", ""),
        (Gpus((device(None),)), "GPU 3", "ok", ""),
        (Gpus((device(40),)), "GPU 3", "warn", "--gpu-memory-utilization 0.47"),
    ],
)
def test_verdicts(gpus: Gpus, check: str, status: Status, change: str) -> None:
    finding, *_ = check_gpus(gpus)
    assert (finding.check, finding.status) == (check, status)
    assert change in finding.change
    assert gpus.problem in finding.found


def test_what_triton_lacks_is_said_before_a_model_is_loaded() -> None:
    assert check_gpus(Gpus((device(79),)))[-1].check == "GPU kernels"
    assert compiler("").status == "ok"
    finding = compiler("a C compiler (gcc or clang)")
    assert finding.status == "wrong" and "a C compiler (gcc or clang)" in finding.found
