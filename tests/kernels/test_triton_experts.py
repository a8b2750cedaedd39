"""The kernels of experts compile for each GPU, keep to registers, and fit into shared memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.kernels import route, triton_experts
from disagg.kernels.triton_experts import (
    DEPTH,
    MAX_PACKED_ROWS_SM80,
    MAX_ROWS,
    MIN_ROWS,
    WIDTH,
    launch_options,
)
from tests.kernels.test_triton import SHARED_NBYTES, SPILLED_NBYTES, _assembled

INTEGERS = {"order_ptr": "*i64", "starts_ptr": "*i32", "chosen_ptr": "*i32"}
# (experts, experts of a token, hidden, inner): Qwen3-30B-A3B and gpt-oss
QWEN3, GPT_OSS = (128, 8, 2048, 768), (128, 4, 2880, 2880)


@pytest.fixture(autouse=True)
def _compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")


def _compile(kernel: Any, arch: int, constants: dict[str, Any], **options: int) -> Any:
    packed = constants.get("PACKED", False)
    types = {**INTEGERS, "scales_ptr": "*u8", "matrix_ptr": "*u8" if packed else "*bf16"}
    if kernel is not triton_experts._gate_up_kernel:
        types["weights_ptr"] = "*fp32"
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*bf16" if name.endswith("_ptr") else "fp32")
        for name in kernel.arg_names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize(
    ("model", "rows", "arch"),
    [
        (QWEN3, MIN_ROWS, 90),
        (QWEN3, MAX_ROWS, 90),
        (GPT_OSS, MIN_ROWS, 90),
        (GPT_OSS, MAX_ROWS, 90),
        (QWEN3, MAX_ROWS, 80),
        (GPT_OSS, MAX_PACKED_ROWS_SM80, 80),
        (QWEN3, MAX_ROWS, 100),
        (GPT_OSS, MIN_ROWS, 100),
    ],
)
def test_products_compile(
    model: tuple[int, int, int, int], rows: int, arch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    num_experts, num_chosen, hidden, inner = model
    packed = model == GPT_OSS
    constants: dict[str, Any] = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": num_experts,
        "HIDDEN": hidden,
        "INNER": inner,
        "ROWS": rows,
        "WIDTH": WIDTH,
        "DEPTH": triton_experts.PACKED_DEPTH if packed else DEPTH,
        "PACKED": packed,
        "HAS_BIAS": packed,
    }
    if not packed:
        constants |= {"scales_ptr": None, "bias_ptr": None}
    for kernel, its in (
        (triton_experts._gate_up_kernel, {"NUM_CHOSEN": num_chosen, "CLAMPED": packed}),
        (triton_experts._down_kernel, {}),
    ):
        compiled = _compile(kernel, arch, {**constants, **its}, **launch_options(rows))
        registers, spilled_nbytes = _assembled(capsys.readouterr().out)
        print(registers, "registers,", compiled.metadata.shared, "bytes shared,", spilled_nbytes)
        assert compiled.metadata.shared <= SHARED_NBYTES[arch]
        assert spilled_nbytes <= SPILLED_NBYTES[arch]
        assert re.search(r"wgmma|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])


@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
def test_routing_compiles_without_spills(arch: int, capsys: pytest.CaptureFixture[str]) -> None:
    constants = {
        "NUM_EXPERTS": 128,
        "NUM_CHOSEN": 8,
        "EXPERTS": 128,
        "CHOSEN": 8,
        "NORMALIZED": True,
    }
    _compile(route._route_kernel, arch, constants, num_warps=1)
    assert _assembled(capsys.readouterr().out)[1] == 0
