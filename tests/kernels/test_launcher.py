"""A remembered launch is the one that Triton would have made."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from disagg.kernels.gpu.launcher import KernelLauncher, next_power_of_2
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.kv_pages import FORMATS
from tests.kernels.paged_inputs import PagedInputs, paged_inputs
from tests.kernels.recording_driver import RecordingDriver, recording


@triton.jit(do_not_specialize=["anything"], do_not_specialize_on_alignment=["step_ptr"])
def _kernel(
    x_ptr, step_ptr, none_ptr, number, anything, factor, SIZE: tl.constexpr, ADD: tl.constexpr
):
    columns = tl.program_id(0) * number + tl.arange(0, SIZE)
    x = tl.load(x_ptr + columns).to(tl.float32) * factor + anything
    if ADD:
        x += tl.load(step_ptr + columns)
    if none_ptr is not None:
        x += tl.load(none_ptr + columns)
    tl.store(x_ptr + columns, x.to(x_ptr.dtype.element_ty))


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDriver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with recording() as recorder:
        yield recorder


def _in_every_way() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that differ in one thing, or two, that Triton compiles other code for."""
    wide, half = torch.zeros(80), torch.zeros(80, dtype=torch.float16)
    tensors = (wide, wide[1:], half, half[1:], half[8:])
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, step, none, 3, 5, 0.5), {"SIZE": 16, "ADD": True, "num_warps": 1})
        for x, step, none in product(tensors, (wide, wide[1:], half), (None, wide, wide[1:]))
    ]
    numbers = (0, 1, 2, 15, 16, 17, 1 << 30, 1 << 31, (1 << 31) + 1, 1 << 34)
    for number, anything in product(numbers, numbers):
        constants = {"SIZE": 16, "ADD": False, "num_warps": 1}
        calls.append(((wide, wide, None, number, anything, 2.0), constants))
    for size, add, num_warps in product((16, 32), (False, True), (1, 2)):
        constants = {"SIZE": size, "ADD": add, "num_warps": num_warps}
        calls.append(((wide, wide, None, 1, 1, 2.0), constants))
    return calls


@pytest.mark.timeout(600)
def test_each_launch_is_the_one_that_triton_makes(recorder: RecordingDriver) -> None:
    launcher, calls = KernelLauncher(_kernel), _in_every_way()
    for arguments, constants in calls:
        _kernel[(3, 2)](*arguments, **constants)
    expected, recorder.launches = recorder.launches, []
    assert len({handle for handle, *_ in expected}) > 20  # they really are different
    for _ in range(3):
        for arguments, constants in calls:
            launcher((3, 2), *arguments, **constants)
        assert recorder.launches == expected
        recorder.launches = []


def test_each_device_has_its_own_code(
    recorder: RecordingDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "disagg.kernels.gpu.launcher")
    monkeypatch.setattr("disagg.kernels.gpu.launcher.SLOW_S", -1.0)  # Triton may have it on disk
    launcher, x = KernelLauncher(_kernel), torch.zeros(16)
    for device, stream in ((2000, 1), (2001, 2), (2000, 3), (2001, 4)):
        recorder.device, recorder.stream = device, stream
        launcher((1,), x, x, None, 1, 1, 0.5, SIZE=16, ADD=False, num_warps=1)
    handles = [handle for handle, *_ in recorder.launches]
    assert handles[0] != handles[1]
    assert handles == handles[:2] * 2
    assert "Kernel _kernel was compiled" in caplog.text


def _layer(ops: TritonOps, inputs: PagedInputs) -> None:
    """What a decoder asks of Triton in one layer."""
    qkv, (num_tokens, _, head_dim) = inputs.qkv, inputs.qkv.shape
    x = torch.zeros(num_tokens, 32, dtype=qkv.dtype)
    ops.rms_norm(x, x[0], 1e-6)
    ops.norm_rope_(qkv[:, :4], None, 1e-6, torch.zeros(num_tokens, 2, head_dim // 2))
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    for layer in range(2):
        ops.attention(qkv, inputs.kv_cache, layer, None, paging)
    matrix = ops.pack(torch.zeros(32, 32, dtype=qkv.dtype), None)
    ops.project_add_norm(x, matrix, x, x[0], 1e-6)
    ops.project_gated(x, ops.pack_gated(torch.zeros(64, 32, dtype=qkv.dtype), None))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_layer_goes_triton_s_way_once(
    name: str, recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = paged_inputs([(1, 600), (20, 70)], group=3, dtype=torch.bfloat16, format=FORMATS[name])
    ops = TritonOps(6, 1)
    _layer(ops, inputs)
    first = [(handle, grid) for handle, grid, _ in recorder.launches]
    recorder.launches = []

    def searched(*arguments: object, **options: object) -> None:
        raise AssertionError("Triton was asked for a kernel that was launched before")

    monkeypatch.setattr(triton.JITFunction, "run", searched)
    _layer(ops, inputs)
    assert [(handle, grid) for handle, grid, _ in recorder.launches] == first


def test_next_power_of_2() -> None:
    numbers = [*range(1, 300), 4096, 4097, 14336]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
