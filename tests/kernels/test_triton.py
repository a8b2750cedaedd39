"""Triton kernels without a GPU: values through the interpreter, code through the compiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.kernels import fixed_work, kv_write, norm_rope, paged_attention, rms_norm, silu_mul
from disagg.kernels.attention_work import MIN_SPLIT_KEYS
from disagg.kernels.kv_pages import FORMATS, KVFormat
from disagg.kernels.paged_work import KEY_TILE
from tests.kernels.interpreter import run_interpreted

# Of each architecture: shared memory that a program may use.
SHARED_NBYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # A100; H100, H200; B200
SPILLED_NBYTES = {80: 64, 90: 8, 100: 16}  # of a thread: a few values outside the inner loop
STEP_TENSORS = ("slots_ptr", *paged_attention._STEP_TENSORS)
STRIDES = (
    "token_stride",
    "block_stride",
    "scale_block_stride",
)  # multiples of 16 in every supported model
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
    **dict.fromkeys(("partial_ptr", "rope_ptr", "scales_ptr", "sinks_ptr"), "*fp32"),
}
STORED = {"bf16": "*bf16", "int8": "*i8", "int4": "*i8", "fp8": "*fp8e4nv"}
PAIRS = {"bf16": "*bf16", "int8": "*i16", "int4": "*i16", "fp8": "*i16"}
FLOATS = ("scale", "eps")


@pytest.mark.timeout(600)
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    run_interpreted("tests/kernels/interpreted_cases.py", "tests/kernels/interpreted_experts.py")


def _compile(
    kernel: Any, arch: int, constants: dict[str, Any], stored: str = "bf16", **options: int
) -> Any:
    """Machine code of a kernel for sm_`arch`, with a cache that stores values as `stored`."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in FLOATS:
            return "fp32"
        if name == "pages_ptr":
            in_pairs = "ROWS" in constants and _in_pairs(stored, constants["ROWS"])
            return (PAIRS if in_pairs else STORED)[stored]
        if name == "weight_ptr" and kernel is not rms_norm._rms_norm_kernel:
            return "*fp32"
        return POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")

    if stored == "bf16" and "scales_ptr" in kernel.arg_names:
        constants = {**constants, "scales_ptr": None, "scale_block_stride": 0}
    signature = {name: type_of(name) for name in kernel.arg_names}
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") and name not in STEP_TENSORS)
        or (name in STRIDES and kind != "constexpr")
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _format(stored: str) -> KVFormat:
    return FORMATS["bfloat16" if stored == "bf16" else stored]


def _page(stored: str, block_size: int, head_dim: int) -> dict[str, Any]:
    """Constants of a page."""
    format = _format(stored)
    stride = format.page_nbytes(block_size, head_dim) // format.dtype.itemsize
    return {
        "PAGE_STRIDE": stride,
        "SCALE_PAGE_STRIDE": stride // 4,
        "LARGEST": format.largest,
        "PACKED": format.packed,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
    }


def _in_pairs(stored: str, rows: int) -> bool:
    """Whether attention reads int16, two bytes in each, into tiles of so many rows."""
    format = _format(stored)
    return format.has_scales and rows * format.packed <= paged_attention.MAX_PAIR_ROWS


def _units(stored: str, rows: int, block_size: int, head_dim: int) -> dict[str, Any]:
    """Constants of a page for attention."""
    constants = _page(stored, block_size, head_dim)
    packed = constants.pop("PACKED")
    if not _in_pairs(stored, rows):
        return {**constants, "PARTS": packed}
    return {**constants, "PAGE_STRIDE": constants["PAGE_STRIDE"] // 2, "PARTS": 2 * packed}


def _assembled(said: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that went to memory for want of them.

    Args:
        said: by the assembler, which Triton ran.
    """
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.findall(r"Used (\d+) registers", said)
    assert found and registers, said
    return max(map(int, registers)), sum(int(count) for pair in found for count in pair)


@pytest.fixture(autouse=True)
def _compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the assembler says is printed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")


SHAPES = [  # rows, head_dim, block_size, window
    (16, 64, 16, 0),
    (16, 128, 64, 0),
    (16, 128, 16, 4096),
    (64, 128, 64, 0),
    (128, 64, 64, 4096),
    (128, 128, 64, 0),
    (128, 128, 16, 0),
]
FEW_SHAPES = [(16, 128, 64, 0), (16, 64, 16, 4096), (128, 128, 64, 0)]
ATTENTION = [
    *((90, "bf16", *shape) for shape in SHAPES),
    *((90, stored, *shape) for stored in ("int8", "int4", "fp8") for shape in FEW_SHAPES),
    *((100, stored, *shape) for stored in STORED for shape in FEW_SHAPES[::2]),
    *((80, stored, *shape) for stored in ("bf16", "int8", "int4") for shape in FEW_SHAPES[::2]),
]


@pytest.mark.parametrize(("arch", "stored", "rows", "head_dim", "block_size", "window"), ATTENTION)
def test_attention_compiles_and_is_pipelined(
    arch: int,
    stored: str,
    rows: int,
    head_dim: int,
    block_size: int,
    window: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "ROWS": rows,
        "TILE": KEY_TILE,
        "WINDOW": window,
        "HAS_SINKS": head_dim == 64,  # of gpt-oss
        **_units(stored, rows, block_size, head_dim),
    }
    if not constants["HAS_SINKS"]:
        constants["sinks_ptr"] = None
    num_units = head_dim // constants["PARTS"]
    in_pairs = _in_pairs(stored, rows)
    unit_nbytes = 2 if in_pairs else _format(stored).dtype.itemsize
    options = paged_attention.launch_options(rows, num_units * unit_nbytes)
    kernel = paged_attention._paged_attention_kernel
    compiled = _compile(kernel, arch, constants, stored, **options)
    registers, spilled_nbytes = _assembled(capsys.readouterr().out)
    print(registers, "registers,", compiled.metadata.shared, "bytes shared")  # pytest -rP shows it
    assert spilled_nbytes <= SPILLED_NBYTES[arch]
    assert compiled.metadata.shared <= SHARED_NBYTES[arch]
    # Two or more tiles of keys lie in shared memory: one is used while the next one comes. They
    # lie there as they are stored: nothing is widened before it is needed.
    kinds = {"bf16": "bf16", "int8": "i8", "int4": "i8", "fp8": "f8E4M3FN"}
    unit = "i16" if in_pairs else kinds[stored]
    tile = rf"memdesc<(\d+)x{KEY_TILE}x{num_units}x{unit}"
    assert max(map(int, re.findall(tile, compiled.asm["ttgir"]))) >= 2
    assert re.search(r"wgmma|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])
    if in_pairs:  # nothing comes byte by byte on its way from shared memory into a product
        assert not re.search(r"ld\.shared(\.v\d)?\.[bus]8", compiled.asm["ptx"])


def test_e4m3_needs_an_sm_89() -> None:
    """Why `choose_format` refuses it on older ones: Triton does, in the middle of a start."""
    constants = {"NUM_QUERY_VALUES": 4096, "NUM_PAGES": 16, "PAGES": 16, **_page("fp8", 64, 128)}
    with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
        _compile(kv_write._kv_write_kernel, 80, constants, "fp8", num_warps=4)


@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("num_seqs", [64, 512])
def test_the_cut_of_decodes_compiles(
    num_seqs: int, window: int, arch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a step of so many sequences on an H200: 49 programs for each of eight KV heads."""
    constants = {
        "NUM_PROGRAMS": 49,
        "WINDOW": window,
        "TILE": KEY_TILE,
        "LEAST_KEYS": MIN_SPLIT_KEYS,
        "ROWS": num_seqs,
        "PIECES": 64,
    }
    _compile(fixed_work._cut_kernel, arch, constants, "bf16", num_warps=4)
    assert _assembled(capsys.readouterr().out)[1] == 0


@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
@pytest.mark.parametrize(
    ("kernel", "constants", "stored"),
    [
        (rms_norm._rms_norm_kernel, {"SIZE": 4096, "BLOCK": 4096, "ADD": True}, "bf16"),
        (silu_mul._silu_mul_kernel, {"SIZE": 14336, "BLOCK": 1024}, "bf16"),
        (norm_rope._norm_rope_kernel, {"HEAD_DIM": 128, "BLOCK": 64, "HAS_NORM": True}, "bf16"),
        *(
            (
                kv_write._kv_write_kernel,
                {"NUM_QUERY_VALUES": 4096, "NUM_PAGES": 16, "PAGES": 16, **_page(kind, 64, 128)},
                kind,
            )
            for kind in STORED
        ),
        (
            paged_attention._reduce_kernel,
            {
                "NUM_KV_HEADS": 8,
                "GROUP": 4,
                "ROWS": 16,
                "HEAD_DIM": 128,
                "BLOCK_D": 128,
                "PARTIALS": paged_attention.REDUCED_AT_ONCE,
                "HAS_SINKS": True,
            },
            "bf16",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kernels_compile_without_spills(
    arch: int,
    kernel: Any,
    constants: dict[str, Any],
    stored: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (arch, stored) == (80, "fp8"):
        return  # refused: `test_e4m3_needs_an_sm_89`
    _compile(kernel, arch, constants, stored, num_warps=4)
    assert _assembled(capsys.readouterr().out)[1] == 0
