"""Triton kernels without a GPU: values through the interpreter, code through the compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.kernels import kv_write, norm_rope, paged_attention, rms_norm, silu_mul

ROOT = Path(__file__).parents[2]
HOPPER = GPUTarget("cuda", 90, 32)
SHARED_NBYTES = 227 * 1024  # what a program may use on an H100 or H200
STEP_TENSORS = ("slots_ptr", *paged_attention._STEP_TENSORS)
STRIDES = ("token_stride", "block_stride")  # multiples of 16 in every supported model
POINTERS = {
    "slots_ptr": "*i64",
    **dict.fromkeys(
        (
            "tables_ptr",
            "query_start_ptr",
            "context_lens_ptr",
            "pieces_ptr",
            "reductions_ptr",
        ),
        "*i32",
    ),
    **dict.fromkeys(("partial_ptr", "rope_ptr"), "*fp32"),
}
FLOATS = ("scale", "eps")


@pytest.mark.timeout(600)
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    """The interpreter is chosen when Triton is imported, hence a process of its own."""
    command = [sys.executable, "-m", "pytest", "tests/kernels/interpreted_cases.py", "-x"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def _compile(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in FLOATS:
            return "fp32"
        if name == "weight_ptr" and kernel is not rms_norm._rms_norm_kernel:
            return "*fp32"
        return POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")

    signature = {name: type_of(name) for name in kernel.arg_names}
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") and name not in STEP_TENSORS) or name in STRIDES
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=HOPPER, options=options)


def _spilled_nbytes(compiled: Any, directory: Path) -> int:
    """What the assembler says went to memory for want of registers."""
    ptx = directory / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx)]
    done = subprocess.run(
        [*command, "-o", str(directory / "kernel.cubin")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert found, done.stderr
    return sum(int(count) for pair in found for count in pair)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize(
    ("rows", "head_dim", "block_size", "window"),
    [
        (16, 64, 16, 0),
        (16, 128, 64, 0),
        (16, 128, 16, 4096),
        (64, 128, 64, 0),
        (128, 64, 64, 4096),
        (128, 128, 64, 0),
        (128, 128, 16, 0),
    ],
)
def test_attention_compiles_for_hopper_without_spills_and_pipelined(
    rows: int, head_dim: int, block_size: int, window: int, tmp_path: Path
) -> None:
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "ROWS": rows,
        "TILE": paged_attention.KEY_TILE,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "WINDOW": window,
    }
    options = paged_attention.launch_options(rows, head_dim * 2)
    compiled = _compile(paged_attention._paged_attention_kernel, constants, **options)
    assert _spilled_nbytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_NBYTES
    # Two or more tiles of keys lie in shared memory: one is used while the next one comes.
    tile = rf"memdesc<(\d+)x{paged_attention.KEY_TILE}x{head_dim}xbf16"
    assert max(map(int, re.findall(tile, compiled.asm["ttgir"]))) >= 2
    assert "wgmma" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"]


HEADS = {"HEAD_DIM": 128, "BLOCK_SIZE": 64}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (rms_norm._rms_norm_kernel, {"SIZE": 4096, "BLOCK": 4096, "ADD": True}),
        (silu_mul._silu_mul_kernel, {"SIZE": 14336, "BLOCK": 1024}),
        (norm_rope._norm_rope_kernel, {"HEAD_DIM": 128, "BLOCK": 64, "HAS_NORM": True}),
        (
            kv_write._kv_write_kernel,
            {**HEADS, "NUM_QUERY_VALUES": 4096, "NUM_VALUES": 2048, "BLOCK": 2048},
        ),
        (
            paged_attention._reduce_kernel,
            {"NUM_KV_HEADS": 8, "GROUP": 4, "ROWS": 16, "HEAD_DIM": 128, "BLOCK_D": 128},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kernels_compile_for_hopper_without_spills(
    kernel: Any, constants: dict[str, Any], tmp_path: Path
) -> None:
    assert _spilled_nbytes(_compile(kernel, constants, num_warps=4), tmp_path) == 0
