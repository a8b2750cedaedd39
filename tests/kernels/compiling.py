"""Compiles Triton kernels for GPUs that need not be here, and checks the code that comes out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.devices import LARGE_SHARED_NBYTES
from disagg.kernels.gpu import (
    adapters,
    attention_work,
    delta_net,
    gated_mul,
    kv_write,
    latent_attention,
    norm_rope,
    paged_attention,
    rms_norm,
    token_index,
)
from disagg.kernels.gpu.attention_work import ENDLESS, KEY_TILE, MIN_SPLIT_KEYS
from disagg.kernels.gpu.latent_group import latent_group
from disagg.kernels.kv_pages import FORMATS, KVFormat

# Registers of a thread, and bytes that went to memory for want of them, of what was compiled last.
Assembler: TypeAlias = Callable[[], tuple[int, int]]

# Of each architecture: shared memory that a program may use.
SHARED_NBYTES = {
    80: 163 * 1024,  # A100
    89: 99 * 1024,  # L4, L40S, RTX 40; RTX 30 and A10 (86) have as much
    90: 227 * 1024,  # H100, H200
    100: 227 * 1024,  # B200
    120: 99 * 1024,  # RTX 50, RTX PRO 6000
}
# Of a thread, stored and loaded: a few values. An sm_120's assembler needs more registers.
SPILLED_NBYTES = {80: 64, 89: 128, 90: 8, 100: 16, 120: 384}
STEP_TENSORS = ("slots_ptr", *paged_attention._STEP_TENSORS, *token_index._STEP_TENSORS)
STRIDES = (
    "token_stride",
    "block_stride",
    "scale_block_stride",
)  # multiples of 16 in every supported model
POINTERS = {
    **dict.fromkeys(("slots_ptr", "table_rows_ptr"), "*i64"),
    **dict.fromkeys(
        (
            "tables_ptr",
            "query_start_ptr",
            "context_lens_ptr",
            "pieces_ptr",
            "reductions_ptr",
            "counts_ptr",
            "order_ptr",
            "starts_ptr",
            "seen_ptr",
            "contexts_ptr",
            "chosen_ptr",
        ),
        "*i32",
    ),
    **dict.fromkeys(("scores_ptr", "weights_ptr"), "*fp32"),
    "rows_ptr": "*i64",
    **dict.fromkeys(("partial_ptr", "rope_ptr", "scales_ptr", "sinks_ptr", "sums_ptr"), "*fp32"),
    **dict.fromkeys(("states_ptr", "decay_ptr", "beta_ptr"), "*fp32"),
}
STORED = {"bf16": "*bf16", "int8": "*i8", "int4": "*i8", "fp8": "*fp8e4nv"}
PAIRS = {"bf16": "*bf16", "int8": "*i16", "int4": "*i16", "fp8": "*i16"}
FLOATS = ("scale", "eps")
CAP = 72.13  # of scores, 50 in base 2


def is_pointer(name: str) -> bool:
    return name.endswith("_ptr")


def compile_with(
    kernel: Any,
    arch: int,
    constants: dict[str, Any],
    type_of: Callable[[str], str],
    is_aligned: Callable[[str], bool],
    **options: int,
) -> Any:
    """Machine code of a kernel for sm_`arch`, whose arguments have these types.

    Args:
        is_aligned: whether an argument is a multiple of 16.
    """
    signature = {
        name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and is_aligned(name)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def check_product(assembler: Assembler, compiled: Any, arch: int) -> None:
    """It keeps to registers, fits into shared memory, and uses the tensor cores."""
    registers, spilled_nbytes = assembler()
    print(registers, "registers,", compiled.metadata.shared, "bytes shared,", spilled_nbytes)
    assert spilled_nbytes <= SPILLED_NBYTES[arch]
    assert compiled.metadata.shared <= SHARED_NBYTES[arch]
    assert not early_loads(compiled)
    assert re.search(r"wgmma|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])


def compile_for(
    kernel: Any, arch: int, constants: dict[str, Any], stored: str = "bf16", **options: int
) -> Any:
    """Machine code of a kernel for sm_`arch`, with a cache that stores values as `stored`."""

    def type_of(name: str) -> str:
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

    def is_aligned(name: str) -> bool:
        return name in STRIDES or (is_pointer(name) and name not in STEP_TENSORS)

    return compile_with(kernel, arch, constants, type_of, is_aligned, **options)


def _format(stored: str) -> KVFormat:
    return FORMATS["bfloat16" if stored == "bf16" else stored]


def page_constants(stored: str, block_size: int, head_dim: int) -> dict[str, Any]:
    """Constants of a page."""
    format = _format(stored)
    stride = format.page_nbytes(block_size, head_dim) // format.dtype.itemsize
    return {
        "PAGE_STRIDE": stride,
        "SCALE_PAGE_STRIDE": stride // 4,
        "HEAD_PAGES": 64,
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
    constants = page_constants(stored, block_size, head_dim)
    packed = constants.pop("PACKED")
    if not _in_pairs(stored, rows):
        return {**constants, "PARTS": packed}
    return {**constants, "PAGE_STRIDE": constants["PAGE_STRIDE"] // 2, "PARTS": 2 * packed}


def assembled(said: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that went to memory for want of them.

    Args:
        said: by the assembler, which Triton ran.
    """
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.findall(r"Used (\d+) registers", said)
    assert found and registers, said
    return max(map(int, registers)), sum(int(count) for pair in found for count in pair)


def early_loads(compiled: Any) -> list[str]:
    """Loads of a sum from a B200's tensor memory in front of the barrier of the product before.

    In a loop that adds several products to one sum, Triton before 3.8 may put them in this order
    (triton-lang/triton#10821): the sum is read too early, and every result is wrong.
    """
    found = []
    barriers: dict[str, str] = {}  # of the products in this part of a loop, by their sum
    for line in map(str.strip, compiled.asm["ttgir"].splitlines()):
        product = re.match(
            r"ttng\.tc_gen5_mma \S+, \S+, (%[\w#]+).*, (%[\w#]+)\[\S+ {is_async", line
        )
        if "scf.for" in line or "scf.yield" in line:
            barriers = {}
        elif product is not None:
            barriers[product[1]] = product[2]
        elif waited := re.match(r"ttng\.wait_barrier (%[\w#]+)", line):
            barriers = {each: name for each, name in barriers.items() if name != waited[1]}
        elif (loaded := re.search(r"= ttng\.tmem_load (%[\w#]+)", line)) and loaded[1] in barriers:
            found.append(line)
    return found


def check_attention(
    assembler: Assembler,
    arch: int,
    stored: str,
    rows: int,
    head_dim: int,
    block_size: int,
    window: int,
    cap: float = 0.0,
) -> None:
    """It is pipelined, fits into shared memory, and reads KV in few steps."""
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "ROWS": rows,
        "TILE": KEY_TILE,
        "WINDOW": window,
        "CAP": cap,
        **_units(stored, rows, block_size, head_dim),
    }
    if head_dim != 64:  # of gpt-oss
        constants["sinks_ptr"] = None
    num_units = head_dim // constants["PARTS"]
    in_pairs = _in_pairs(stored, rows)
    unit_nbytes = 2 if in_pairs else _format(stored).dtype.itemsize
    options = paged_attention.launch_options(rows, num_units * unit_nbytes)
    kernel = paged_attention._paged_attention_kernel
    compiled = compile_for(kernel, arch, constants, stored, **options)
    check_product(assembler, compiled, arch)
    # Two or more tiles of keys lie in shared memory: one is used while the next one comes. They
    # lie there as they are stored: nothing is widened before it is needed.
    kinds = {"bf16": "bf16", "int8": "i8", "int4": "i8", "fp8": "f8E4M3FN"}
    unit = "i16" if in_pairs else kinds[stored]
    tile = rf"memdesc<(\d+)x{KEY_TILE}x{num_units}x{unit}"
    assert max(map(int, re.findall(tile, compiled.asm["ttgir"]))) >= 2
    if in_pairs:  # nothing comes byte by byte on its way from shared memory into a product
        assert not re.search(r"ld\.shared(\.v\d)?\.[bus]8", compiled.asm["ptx"])


def check_latent_attention(
    assembler: Assembler,
    arch: int,
    rows: int,
    block_size: int,
    num_heads: int = 128,
    *,
    are_chosen: bool = False,
) -> None:
    """Of DeepSeek-V3: it keeps to registers, fits into shared memory, and uses the tensor cores.

    are_chosen: of V3.2, in which an index has chosen the tokens.
    """
    group = rows if are_chosen else latent_group(num_heads)
    is_small = SHARED_NBYTES[arch] < LARGE_SHARED_NBYTES
    most = latent_attention.MIN_TILE if is_small else latent_attention.MAX_TILE
    constants: dict[str, Any] = {
        "NUM_GROUPS": num_heads // group,
        "GROUP": group,
        "ROWS": rows,
        "NUM_CHOSEN": 2048 if are_chosen else 0,
        "RANK": 512,
        "ROPE": 64,
        "VECTOR": 704 if are_chosen else 576,
        "BLOCK_RANK": 512,
        "BLOCK_ROPE": 64,
        "TILE": latent_attention.key_tile(block_size, most, are_chosen=are_chosen),
        "BLOCK_SIZE": block_size,
    }
    if not are_chosen:
        constants["chosen_ptr"] = None
    options = latent_attention.launch_options(rows)
    kernel = latent_attention._latent_attention_kernel
    compiled = compile_for(kernel, arch, constants, "bf16", **options)
    check_product(assembler, compiled, arch)


def check_token_index(assembler: Assembler, arch: int, num_tokens: int) -> None:
    """Of DeepSeek-V3.2, for so many tokens of a program."""
    sizes = {"HEADS": 64, "DIM": 128, "BLOCK_HEADS": 64, "BLOCK_DIM": 128, "VECTOR": 704}
    tiles = {"TOKENS": num_tokens, "TILE": token_index.SCORED_TILE, "BLOCK_SIZE": 64}
    constants = {**sizes, **tiles, "NUM_CHOSEN": 2048}
    compiled = compile_for(token_index._score_kernel, arch, constants, num_warps=4)
    check_product(assembler, compiled, arch)
    constants = {"NUM_CHOSEN": 2048, "TILE": token_index.CHOSEN_TILE}
    num_warps = token_index.CHOSEN_WARPS
    compile_for(token_index._choose_kernel, arch, constants, num_warps=num_warps)
    assert assembler()[1] <= SPILLED_NBYTES[arch]


def check_cut(assembler: Assembler, arch: int, window: int, *, is_long: bool) -> None:
    """Of a step of up to 1,024 sequences on an H200: 49 programs for each of eight KV heads."""
    constants = {
        "QUERIES": 32 if is_long else 8,
        "NUM_PROGRAMS": 49,
        "MOST_TILES": 49 if is_long else ENDLESS,
        "LEAST_KEYS": MIN_SPLIT_KEYS,
        "WINDOW": window,
        "TILE": KEY_TILE,
        "ENDLESS": ENDLESS,
        "ROWS": 1024,
        "PIECES": 64,
    }
    compile_for(attention_work._cut_kernel, arch, constants, "bf16", num_warps=4)
    assert assembler()[1] == 0


_ROPE = {
    "HEAD_STRIDE": 128,
    "HEAD_DIM": 128,
    "ROPE_DIM": 128,
    "BLOCK": 64,
    "REST_BLOCK": 1,
}
_HALF_ROPE = {**_ROPE, "ROPE_DIM": 64, "BLOCK": 32, "REST_BLOCK": 64}
# Kernels beside attention, with the sizes of a model of 8 billion parameters.
_SHRINK = {"COLUMNS": adapters.COLUMNS}
_EXPAND = {"WIDTH": adapters.WIDTH}
_QWEN3_NEXT = {
    "table_rows_ptr": None,
    "FIRST_GROUP": 1,
    "BLOCK_SIZE": 64,
    "HELD": 22,
    "STATE_NUMEL": 17536,
    "NUM_KEY_HEADS": 16,
    "NUM_HEADS": 32,
    "KEY_DIM": 128,
    "VALUE_DIM": 128,
    "BLOCK_K": 128,
    "BLOCK_V": 128,
    "TAPS": 4,
    "CHUNK": 1,
    "LONG": delta_net.CHUNK,
}
OTHERS: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (adapters._shrink_kernel, {**_SHRINK, **sizes}, "bf16")
        for sizes in (
            {"NUM_IN": 4096, "SUMS": 48, "OWN": 512, "ROWS": adapters.FEW_ROWS, "TILE": 16},
            {"NUM_IN": 14336, "SUMS": 64, "OWN": 14336, "ROWS": adapters.MANY_ROWS, "TILE": 64},
        )
    ),
    *(
        (adapters._expand_kernel, {**_EXPAND, **sizes}, "bf16")
        for sizes in (
            {"OUTPUTS": 3, "RANK": 16, "ROWS": adapters.FEW_ROWS, "PART": 16},
            {"OUTPUTS": 2, "RANK": 256, "ROWS": adapters.MANY_ROWS, "PART": 64},
        )
    ),
    (delta_net._delta_net_kernel, _QWEN3_NEXT, "bf16"),
    (rms_norm._rms_norm_kernel, {"SIZE": 4096, "BLOCK": 4096}, "bf16"),
    *(
        (gated_mul._gated_mul_kernel, {"SIZE": 14336, "BLOCK": 1024, "IS_GELU": is_gelu}, "bf16")
        for is_gelu in (False, True)
    ),
    (norm_rope._norm_rope_kernel, {**_ROPE, "squares_ptr": None}, "bf16"),
    (norm_rope._norm_rope_kernel, _HALF_ROPE, "bf16"),
    *(
        (
            kv_write._kv_write_kernel,
            {
                "NUM_QUERY_VALUES": 4096,
                "NUM_HEADS": 8,
                "NUM_PAGES": 16,
                "PAGES": 16,
                **page_constants(kind, 64, 128),
            },
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
        },
        "bf16",
    ),
    (
        paged_attention._reduce_kernel,  # of latents
        {
            "NUM_KV_HEADS": 8,
            "GROUP": 16,
            "ROWS": 16,
            "HEAD_DIM": 512,
            "BLOCK_D": 512,
            "PARTIALS": latent_attention.REDUCED_AT_ONCE,
            "sinks_ptr": None,
        },
        "bf16",
    ),
    (
        kv_write._kv_write_kernel,
        {
            "NUM_QUERY_VALUES": 16 * 576,
            "NUM_HEADS": 1,
            "NUM_PAGES": 1,
            "PAGES": 1,
            **page_constants("bf16", 64, 576),
            "BLOCK_D": 1024,
        },
        "bf16",
    ),
    (
        norm_rope._norm_rope_kernel,
        {
            **_ROPE,
            "HEAD_STRIDE": 576,
            "HEAD_DIM": 64,
            "ROPE_DIM": 64,
            "BLOCK": 32,
            "norm_ptr": None,
            "squares_ptr": None,
        },
        "bf16",
    ),
]


def check_delta_nets_in_chunks(assembler: Assembler, arch: int) -> None:
    sizes = {"CHUNK": delta_net.CHUNK, "BLOCK_V": delta_net.CHUNK_TILE}
    constants, num_warps = {**_QWEN3_NEXT, **sizes}, delta_net.CHUNK_WARPS
    compiled = compile_for(delta_net._delta_net_kernel, arch, constants, num_warps=num_warps)
    check_product(assembler, compiled, arch)


def check_without_spills(
    assembler: Assembler, arch: int, kernel: Any, constants: dict[str, Any], stored: str
) -> None:
    compile_for(kernel, arch, constants, stored, num_warps=4)
    assert assembler()[1] == 0
