"""Kernels of Triton without a GPU: code through the compiler; values in `test_interpreted.py`.

They keep to registers, fit into shared memory and use the tensor cores. Each kernel is compiled for
an H100, with each format of KV and of weights; in all sizes for all architectures, which takes
minutes of a processor, by `make test-bench`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from disagg.kernels.gpu import kv_write, token_index
from disagg.kernels.gpu.eight_bit_tile import kinds_of
from disagg.kernels.gpu.experts import (
    MAX_B200_ROWS_IN_8_BITS,
    MAX_ROWS,
    MIN_ROWS,
)
from disagg.kernels.gpu.packed_linear import MOST_SPLIT_ROWS
from disagg.kernels.gpu.packed_tile import FEW_WARPS_ROWS
from disagg.kernels.gpu.packed_tile import max_rows as packed_max_rows
from tests.grids import some
from tests.kernels.compiling import (
    CAP,
    OTHERS,
    SHARED_NBYTES,
    STORED,
    Assembler,
    check_attention,
    check_cut,
    check_delta_nets_in_chunks,
    check_latent_attention,
    check_token_index,
    check_without_spills,
    compile_for,
    early_loads,
    page_constants,
)
from tests.kernels.compiling_experts import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_OF_8,
    GPT_OSS,
    QWEN3,
    QWEN3_235B,
    check_products,
    check_routing,
    check_sums,
)
from tests.kernels.compiling_packed import (
    FORMATS,
    IN_8_BITS,
    check_adding,
    check_packed,
    check_quantizing,
)
from tests.kernels.compiling_sampling import (
    KERNELS,
    WITHOUT_FLOORS,
    check_sampling,
    check_step_arrays,
)

SM = 90  # H100 and H200
ARCHES = some([SM], sorted(SHARED_NBYTES))
FEW_FORMATS = ("fp8 blocks", "int8 rows", "int4 groups of 32 with zeros", "nvfp4")
OF_ARCHES = [
    *((name, arch) for arch in (90, 100) for name in FORMATS if name not in IN_8_BITS),
    *((name, arch) for arch in (80, 89, 120) for name in FEW_FORMATS),
]
OF_ARCHES_IN_8_BITS = [
    (name, arch)
    for name, arch in product(IN_8_BITS, (80, 89, 90, 100, 120))
    if FORMATS[name].kind in kinds_of((arch // 10, arch % 10))
]


@pytest.fixture(autouse=True)
def _compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


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
WIDE_SHAPES = [(16, 256, 64, 0), (64, 256, 64, 4096)]  # of Gemma, whose older scores are capped
ATTENTION = some(
    [
        (SM, "bf16", 16, 64, 16, 4096, 0.0),  # with sinks
        (SM, "bf16", 16, 256, 64, 4096, CAP),
        (SM, "int4", 128, 128, 64, 0, 0.0),
        (SM, "fp8", 16, 128, 64, 0, 0.0),
    ],
    [
        *((arch, "bf16", *shape, 0.0) for arch in (90, 100) for shape in WIDE_SHAPES),
        (80, "bf16", *WIDE_SHAPES[0], 0.0),
        *((90, "bf16", *shape, 0.0) for shape in SHAPES),
        *((90, stored, *shape, 0.0) for stored in ("int8", "int4", "fp8") for shape in FEW_SHAPES),
        *((100, stored, *shape, 0.0) for stored in STORED for shape in FEW_SHAPES[::2]),
        *(
            (80, stored, *shape, 0.0)
            for stored in ("bf16", "int8", "int4")
            for shape in FEW_SHAPES[::2]
        ),
        # The least shared memory: the tallest tiles, with and without a page for each tile of keys.
        *((arch, "bf16", *shape, 0.0) for arch in (89, 120) for shape in SHAPES[2:]),
        *(
            (arch, stored, *FEW_SHAPES[-1], 0.0)
            for arch in (89, 120)
            for stored in ("int8", "int4", "fp8")
        ),
        *(
            (arch, "bf16", *shape, 64, 0, CAP)
            for arch in (90, 100)
            for shape in ((64, 256), (128, 128))
        ),
        (90, "int8", *WIDE_SHAPES[0], CAP),
    ],
)


@pytest.mark.parametrize(
    ("arch", "stored", "rows", "head_dim", "block_size", "window", "cap"), ATTENTION
)
def test_attention(
    arch: int,
    stored: str,
    rows: int,
    head_dim: int,
    block_size: int,
    window: int,
    cap: float,
    assembler: Assembler,
) -> None:
    check_attention(assembler, arch, stored, rows, head_dim, block_size, window, cap)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("rows", "block_size"), some([(64, 64)], [(16, 64), (16, 16), (32, 64), (64, 16)])
)
def test_latent_attention(rows: int, block_size: int, arch: int, assembler: Assembler) -> None:
    check_latent_attention(assembler, arch, rows, block_size)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rows", some([64], [16]))
def test_latent_attention_to_chosen_tokens(rows: int, arch: int, assembler: Assembler) -> None:
    check_latent_attention(assembler, arch, rows, 64, are_chosen=True)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("num_tokens", some([token_index.SCORED_TOKENS], [1]))
def test_token_index(num_tokens: int, arch: int, assembler: Assembler) -> None:
    check_token_index(assembler, arch, num_tokens)


@triton.jit
def _two_products(
    a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, SIZE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    side, depth = tl.arange(0, SIDE), tl.arange(0, DEPTH)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(0, SIZE, DEPTH):
        rows = side[:, None] * SIZE + start + depth[None, :]
        columns = (start + depth)[:, None] * SIDE + side[None, :]
        total = tl.dot(tl.load(a_ptr + rows), tl.load(b_ptr + columns), total)
        total = tl.dot(tl.load(c_ptr + rows), tl.load(d_ptr + columns), total)
    tl.store(out_ptr + side[:, None] * SIDE + side[None, :], total)


def test_sums_that_a_b200_would_read_too_early_are_noticed() -> None:
    """No kernel here has any. This one has, as Triton is before 3.8."""
    sizes = {"SIZE": 4096, "SIDE": 64, "DEPTH": 64}
    compiled = compile_for(_two_products, 100, sizes, num_warps=4, num_stages=3)
    is_mended = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    assert bool(early_loads(compiled)) != is_mended


def test_e4m3_needs_an_sm_89() -> None:
    """Why `choose_format` refuses it on older ones: Triton does, in the middle of a start."""
    constants = {
        "NUM_QUERY_VALUES": 4096,
        "NUM_HEADS": 8,
        "NUM_PAGES": 16,
        "PAGES": 16,
        **page_constants("fp8", 64, 128),
    }
    with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
        compile_for(kv_write._kv_write_kernel, 80, constants, "fp8", num_warps=4)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("window", some([4096], [0]))
@pytest.mark.parametrize("is_long", [False, True])
def test_the_cut(is_long: bool, window: int, arch: int, assembler: Assembler) -> None:
    check_cut(assembler, arch, window, is_long=is_long)


@pytest.mark.parametrize("arch", ARCHES)
def test_delta_nets_in_chunks(arch: int, assembler: Assembler) -> None:
    check_delta_nets_in_chunks(assembler, arch)


@pytest.mark.parametrize(
    ("arch", "kernel", "constants", "stored"),
    [
        (arch, *other)
        for arch in ARCHES
        for other in OTHERS
        if (arch, other[2]) != (80, "fp8")  # refused: `test_e4m3_needs_an_sm_89`
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_kernels(
    arch: int, kernel: Any, constants: dict[str, Any], stored: str, assembler: Assembler
) -> None:
    check_without_spills(assembler, arch, kernel, constants, stored)


def _tallest(name: str, arch: int) -> int:
    """Rows of the tallest tile of packed weights."""
    if arch == 100 and FORMATS[name].in_8_bits:
        return MAX_B200_ROWS_IN_8_BITS
    return packed_max_rows(FORMATS[name].kind, FORMATS[name].group or None, arch // 10)


EXPERTS = some(
    [
        (QWEN3, MAX_ROWS, SM, ""),
        (GPT_OSS, MIN_ROWS, SM, ""),
        (DEEPSEEK_V3_OF_8, MAX_ROWS, SM, "fp8 blocks"),
        (DEEPSEEK_V3_OF_8, MAX_ROWS, SM, "fp8 blocks in 8 bits"),
    ],
    [
        (QWEN3, MIN_ROWS, 90, ""),
        *((QWEN3, MAX_ROWS, arch, "") for arch in (80, 90, 100)),
        (QWEN3, 64, 89, ""),  # these have more stages than taller tiles, and most shared memory
        (QWEN3, 64, 120, ""),
        (GPT_OSS, MIN_ROWS, 100, ""),
        *((GPT_OSS, _tallest("mxfp4", arch), arch, "") for arch in (80, 89, 90, 100, 120)),
        *((QWEN3_235B, MIN_ROWS, arch, name) for name, arch in OF_ARCHES),
        *((QWEN3_235B, _tallest(name, arch), arch, name) for name, arch in OF_ARCHES),
        *((DEEPSEEK_V3, MIN_ROWS, arch, "fp8 blocks") for arch in (80, 90, 100)),
        *((QWEN3_235B, _tallest(name, arch), arch, name) for name, arch in OF_ARCHES_IN_8_BITS),
        *(
            (DEEPSEEK_V3, _tallest("fp8 blocks", arch), arch, "fp8 blocks")
            for arch in (80, 90, 100)
        ),
        # The tallest of these tiles take the most shared memory, and these GPUs have the least.
        *(
            (QWEN3_235B, FEW_WARPS_ROWS, arch, name)
            for arch, name in product((89, 120), FEW_FORMATS)
        ),
    ],
)


@pytest.mark.parametrize(("model", "rows", "arch", "packed"), EXPERTS)
def test_products_of_experts(
    model: tuple[int, int, int, int], rows: int, arch: int, packed: str, assembler: Assembler
) -> None:
    check_products(assembler, model, rows, arch, FORMATS[packed] if packed else None)


@pytest.mark.parametrize("arch", ARCHES)
def test_routing(arch: int, assembler: Assembler) -> None:
    check_routing(assembler, arch)
    check_sums(assembler, arch)


@pytest.mark.parametrize(
    ("name", "arch", "num_rows"),
    some(
        [
            ("fp8 blocks", SM, 512),
            ("int4 groups of 128 with zeros", SM, 4),
            ("nvfp4", SM, 512),
            *((name, SM, 512) for name in IN_8_BITS),
        ],
        [
            *((*each, num_rows) for each in OF_ARCHES for num_rows in (1, 32, 4096)),
            *((*each, num_rows) for each in OF_ARCHES_IN_8_BITS for num_rows in (192, 4096)),
        ],
    ),
)
def test_products_of_packed_weights(
    name: str, arch: int, num_rows: int, assembler: Assembler
) -> None:
    check_packed(assembler, FORMATS[name], num_rows, arch, is_split=num_rows <= MOST_SPLIT_ROWS)


@pytest.mark.parametrize(
    ("name", "arch"), some([("fp8 blocks in 8 bits", SM)], OF_ARCHES_IN_8_BITS)
)
def test_quantising_rows(name: str, arch: int, assembler: Assembler) -> None:
    check_quantizing(assembler, FORMATS[name], arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_sum_of_splits(arch: int, assembler: Assembler) -> None:
    check_adding(assembler, arch)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "absent"), some(KERNELS, WITHOUT_FLOORS))
def test_sampling(name: str, absent: str, arch: int) -> None:
    check_sampling(name, absent, arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_step_arrays(arch: int) -> None:
    check_step_arrays(arch)
