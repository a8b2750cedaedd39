"""The log says which kernels were compiled."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from disagg.kernels.gpu import compiler as module
from disagg.kernels.gpu.compiler import next_power_of_2, start_compiler
from tests.kernels.recording_driver import recording


@triton.jit
def _kernel(x_ptr, number, SIZE: tl.constexpr):
    columns = tl.program_id(0) * number + tl.arange(0, SIZE)
    tl.store(x_ptr + columns, tl.load(x_ptr + columns) + number)


@pytest.mark.timeout(600)
def test_the_log_names_what_was_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "disagg.kernels.gpu.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(triton.knobs.runtime, hook, None)  # is as before afterwards
    # Compiling takes long, whatever this process has compiled before.
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=count(step=10).__next__))
    x = torch.zeros(64)
    with recording() as recorder:
        start_compiler()
        for _ in range(3):
            _kernel[3, 2](x, 7, SIZE=16, num_warps=1)
    (first, grid, arguments), *others = recorder.launches
    assert grid == (3, 2, 1) and arguments == (x.data_ptr(), 7)
    assert [handle for handle, *_ in others] == [first] * 2
    assert caplog.text.count("Kernel _kernel was compiled") == 1


def test_next_power_of_2() -> None:
    numbers = [*range(1, 300), 4096, 4097, 14336]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
