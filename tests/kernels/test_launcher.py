"""Kernels are launched as Triton launches them, and the log says what was compiled."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from disagg.kernels.gpu import launcher as module
from disagg.kernels.gpu.launcher import KernelLauncher, next_power_of_2
from tests.kernels.recording_driver import recording


@triton.jit
def _kernel(x_ptr, number, SIZE: tl.constexpr):
    columns = tl.program_id(0) * number + tl.arange(0, SIZE)
    tl.store(x_ptr + columns, tl.load(x_ptr + columns) + number)


@pytest.mark.timeout(600)
def test_the_log_names_what_was_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "disagg.kernels.gpu.launcher")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # The first launch takes long, whatever else this process has compiled before.
    clock = iter([0.0, 10.0, 20.0, 20.0, 30.0, 30.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    launcher, x = KernelLauncher(_kernel), torch.zeros(64)
    with recording() as recorder:
        for _ in range(3):
            launcher((3, 2), x, 7, SIZE=16, num_warps=1)
    (first, grid, arguments), *others = recorder.launches
    assert grid == (3, 2, 1) and arguments == (x.data_ptr(), 7)
    assert [handle for handle, *_ in others] == [first] * 2
    assert caplog.text.count("Kernel _kernel was compiled") == 1


def test_next_power_of_2() -> None:
    numbers = [*range(1, 300), 4096, 4097, 14336]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
