"""Attention over a paged cache in Triton: one kernel for decoding, verification and prompts.

A program takes one piece of work (`attention_work`) and one KV head. The queries that share the
head are packed into the rows of one tile, so grouped queries read each key once. Tiles of keys that
every row sees skip all masking. The softmax is in base 2. Pieces of one sequence are reduced in a
fixed order, so a result does not depend on timing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.attention_tile import attend_tile
from disagg.kernels.gpu.attention_work import KEY_TILE, MAX_SHORT_ROWS, AttentionWork, Launch
from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.kv_pages import SCALE_NBYTES, KVPages
from disagg.kernels.ops import PLAIN_SCORES, PagedBatch, Scores

# Up to so many rows `attend_tile` reads bytes in pairs. For int4 it is half of that, because its
# parts are half as wide.
MAX_PAIR_ROWS = 32
WIDE_NBYTES, MAX_SHORT_ROWS_OF_WIDE = 256, 32
MAX_REDUCERS = 1024  # programs that merge partial results, of which they may have several
REDUCED_AT_ONCE = 64  # partial results, which fit into 64 registers of a thread
_LOG2_E = tl.constexpr(math.log2(math.e))
_NOTHING_SEEN = tl.constexpr(-1.0e30)  # finite, so that a row that sees no key has no NaN


# These tensors are parts of one upload and change from step to step. Neither their alignment nor
# their length may cause another compilation.
_STEP_TENSORS = (
    "tables_ptr", "table_rows_ptr", "query_start_ptr", "context_lens_ptr", "reductions_ptr",
    "counts_ptr",
)  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_STEP_TENSORS)
def _paged_attention_kernel(
    qkv_ptr,
    pages_ptr,
    scales_ptr,
    tables_ptr,
    table_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    pieces_ptr,
    counts_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    sinks_ptr,
    scale,
    token_stride,
    table_stride,
    block_stride,
    scale_block_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    HEAD_PAGES: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    piece, head = tl.program_id(0), tl.program_id(1)
    num_last = tl.num_programs(0) - tl.load(counts_ptr + 1)
    if (piece >= tl.load(counts_ptr)) & (piece < num_last):
        return  # there are fewer pieces in this step
    piece_ptr = pieces_ptr + piece * 6
    sequence = tl.load(piece_ptr)
    first_query, num_queries = tl.load(piece_ptr + 1), tl.load(piece_ptr + 2)
    first_key, end_key = tl.load(piece_ptr + 3), tl.load(piece_ptr + 4)
    partial = tl.load(piece_ptr + 5).to(tl.int64)
    first_token = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - first_token
    context = tl.load(context_lens_ptr + sequence)

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D // PARTS) * PARTS
    query = row // GROUP
    is_used = query < num_queries
    used = is_used[:, None] & (columns < HEAD_DIM)[None, :]
    token = (first_token + first_query + query).to(tl.int64)
    first_position = context - query_len + first_query
    positions = first_position + query
    heads = (head * GROUP + row % GROUP) * HEAD_DIM
    q_ptrs = qkv_ptr + (token * token_stride + heads)[:, None] + columns[None, :]
    # e4m3 and pairs of bytes are widened to float16, so the other operand of a product is too.
    IN_HALF: tl.constexpr = (
        pages_ptr.dtype.element_ty == tl.float8e4nv or pages_ptr.dtype.element_ty == tl.int16
    )
    q, acc = (), ()
    for part in tl.static_range(PARTS):  # the parts that `attend_tile` describes
        loaded = tl.load(q_ptrs + part, mask=used, other=0.0)
        if IN_HALF and loaded.dtype == tl.bfloat16:
            loaded = loaded.to(tl.float16)
        q += (loaded,)
        acc += (tl.zeros([ROWS, BLOCK_D // PARTS], dtype=tl.float32),)

    # Every row sees the keys [full_start, full_end); tiles around them are masked.
    oldest = 0
    full_start = first_key
    if WINDOW > 0:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
        newest_start = tl.maximum(first_position + num_queries - WINDOW, 0)
        full_start = tl.maximum(tl.cdiv(newest_start, TILE) * TILE, first_key)
    full_end = tl.minimum((first_position + 1) // TILE * TILE, end_key // TILE * TILE)
    full_end = tl.maximum(full_end, full_start)

    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.zeros([ROWS], dtype=tl.float32) + _NOTHING_SEEN
    if (sinks_ptr is not None) and partial < 0:  # otherwise the reduction adds the sink once
        peak = tl.load(sinks_ptr + head * GROUP + row % GROUP) * _LOG2_E
        total += 1.0
    table_row = sequence.to(tl.int64)
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + sequence)
    table_ptr = tables_ptr + table_row * table_stride
    page_ptr = pages_ptr + head * (HEAD_PAGES * PAGE_STRIDE)
    if LARGEST != 0.0:
        scales_ptr += head * (HEAD_PAGES * SCALE_PAGE_STRIDE)
    pages = (page_ptr, table_ptr, block_stride, scales_ptr, scale_block_stride)
    seen = (positions, oldest, context, scale)
    if WINDOW > 0:
        for start in range(first_key, tl.minimum(full_start, end_key), TILE):
            acc, total, peak = attend_tile(
                q, acc, total, peak, start, pages, seen, PAGE_STRIDE, SCALE_PAGE_STRIDE, LARGEST,
                PARTS, TILE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW, CAP, True,
            )  # fmt: skip
    for start in range(full_start, full_end, TILE):
        acc, total, peak = attend_tile(
            q, acc, total, peak, start, pages, seen, PAGE_STRIDE, SCALE_PAGE_STRIDE, LARGEST,
            PARTS, TILE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW, CAP, False,
        )  # fmt: skip
    for start in range(full_end, end_key, TILE):
        acc, total, peak = attend_tile(
            q, acc, total, peak, start, pages, seen, PAGE_STRIDE, SCALE_PAGE_STRIDE, LARGEST,
            PARTS, TILE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW, CAP, True,
        )  # fmt: skip

    divisor = tl.where(total > 0.0, total, 1.0)
    weight = peak + tl.log2(divisor)
    if LARGEST != 0.0:
        divisor *= LARGEST
    target = (token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads)[:, None] + columns[None, :]
    slot = (partial * NUM_KV_HEADS + head) * ROWS + row
    for part in tl.static_range(PARTS):
        result = acc[part] / divisor[:, None]
        if partial < 0:
            tl.store(out_ptr + target + part, result.to(out_ptr.dtype.element_ty), mask=used)
        else:
            slots = slot[:, None] * BLOCK_D + columns[None, :] + part
            tl.store(partial_ptr + slots, result, mask=used)
    if partial >= 0:
        tl.store(weight_ptr + slot, weight, mask=is_used)


@triton.jit(do_not_specialize=["num_merged_rows"], do_not_specialize_on_alignment=_STEP_TENSORS)
def _reduce_kernel(
    partial_ptr,
    weight_ptr,
    query_start_ptr,
    reductions_ptr,
    counts_ptr,
    out_ptr,
    sinks_ptr,
    num_merged_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Merge the partial softmaxes of queries and heads, PARTIALS at a time and first to last.

    A program has one query and head at a time. It loads all their partial results at once, because
    a chain of loads would take as long as the attention itself if one sequence fills the device.
    """
    columns = tl.arange(0, BLOCK_D)
    num_rows = tl.load(counts_ptr + 2) * NUM_KV_HEADS * num_merged_rows
    for item in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row, head = item % num_merged_rows, item // num_merged_rows % NUM_KV_HEADS
        reduction_ptr = reductions_ptr + item // num_merged_rows // NUM_KV_HEADS * 5
        sequence = tl.load(reduction_ptr)
        first_query, num_queries = tl.load(reduction_ptr + 1), tl.load(reduction_ptr + 2)
        first_partial, num_partials = tl.load(reduction_ptr + 3), tl.load(reduction_ptr + 4)
        if row < num_queries * GROUP:
            acc = tl.zeros([BLOCK_D], dtype=tl.float32)
            total = 0.0
            peak = _NOTHING_SEEN
            if sinks_ptr is not None:
                total = 1.0
                peak = tl.load(sinks_ptr + head * GROUP + row % GROUP) * _LOG2_E
            for first in range(0, num_partials, PARTIALS):
                index = first + tl.arange(0, PARTIALS)
                is_one = index < num_partials
                slot = ((first_partial + index).to(tl.int64) * NUM_KV_HEADS + head) * ROWS + row
                weight = tl.load(weight_ptr + slot, mask=is_one, other=_NOTHING_SEEN)
                pieces = tl.load(
                    partial_ptr + slot[:, None] * BLOCK_D + columns[None, :],
                    mask=is_one[:, None] & (columns < HEAD_DIM)[None, :],
                    other=0.0,
                )
                new_peak = tl.maximum(peak, tl.max(weight, axis=0))
                decay, gain = tl.exp2(peak - new_peak), tl.exp2(weight - new_peak)
                acc = acc * decay + tl.sum(pieces * gain[:, None], axis=0)
                total = total * decay + tl.sum(gain, axis=0)
                peak = new_peak
            token = (tl.load(query_start_ptr + sequence) + first_query + row // GROUP).to(tl.int64)
            query_head = head * GROUP + row % GROUP
            target = (token * (NUM_KV_HEADS * GROUP) + query_head) * HEAD_DIM + columns
            result = (acc / total).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + target, result, mask=columns < HEAD_DIM)


def launch_options(rows: int, vector_nbytes: int) -> dict[str, int]:
    """Warps and pipeline depth for a query tile of `rows` and keys of `vector_nbytes`.

    The address of a tile depends on a load of its page number, which takes two of the stages. So
    five stages are needed to have two tiles of keys and values in shared memory, one in use and one
    being loaded. Two tiles of wide vectors, such as heads of 256 in 16 bits, fit only beside few
    rows.
    """
    is_wide = vector_nbytes > WIDE_NBYTES
    has_few_rows = rows <= (MAX_SHORT_ROWS_OF_WIDE if is_wide else MAX_SHORT_ROWS)
    return {
        "num_warps": 4 if has_few_rows else 8,
        "num_stages": 5 if has_few_rows or not is_wide else 3,
    }


def in_base_2(scores: Scores, head_dim: int) -> tuple[float, float]:
    """The factor of products and the cap for `attend_tile`; the cap is 0 if there is none.

    Scores are multiplied by log2(e), since 2 is the base of the softmax. If scores are capped, the
    factor gives the exponent of e^(2 score / cap), with which the tile computes tanh.
    """
    scale = (scores.scale or head_dim**-0.5) * math.log2(math.e)
    if scores.cap is None:
        return scale, 0.0
    return 2 * scale / scores.cap, scores.cap * math.log2(math.e)


def paged_attention(
    qkv: Tensor,
    kv_cache: KVPages,
    layer: int,
    batch: PagedBatch,
    work: AttentionWork,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Attend causally to keys and values in the cache, the step's own included.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; only the queries are read.
        work: from `attention_work`, cut for this step.
        sinks: float32 [num_heads], a logit in each head's softmax that has no value; or None.
        scores: how scores are made.

    Returns:
        [num_tokens, num_heads * head_dim].
    """
    num_heads = qkv.shape[1] - 2 * kv_cache.values.shape[3]
    out = torch.empty(qkv.shape[0], num_heads * qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    for launch in work.launches:
        _run(launch, qkv, kv_cache, layer, batch, work.window, out, sinks, scores)
    return out


def _run(
    launch: Launch,
    qkv: Tensor,
    kv_cache: KVPages,
    layer: int,
    batch: PagedBatch,
    window: int | None,
    out: Tensor,
    sinks: Tensor | None,
    scores: Scores,
) -> None:
    """Compute the pieces of one launch, then merge the pieces that belong to one sequence."""
    head_dim, block_size = kv_cache.head_dim, kv_cache.values.shape[4]
    pages = kv_cache.layers[layer]
    units, scales = pages.values, pages.scales
    packed = kv_cache.format.packed
    if launch.rows * packed <= MAX_PAIR_ROWS and pages.pairs is not None:
        units = pages.pairs
    num_kv_heads, _, num_units = units.shape[2:]
    page_nbytes = kv_cache.page_stride * pages.values.element_size()
    parts = head_dim // num_units
    # A product sums over at least 16 values, and each part of a unit has a separate product.
    block_d = max(16 * parts, next_power_of_2(head_dim))
    scale, cap = in_base_2(scores, head_dim)
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": qkv.shape[1] // num_kv_heads - 2,
        "ROWS": launch.rows,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
    }
    num_rows = launch.num_partials * num_kv_heads * launch.rows
    partials = torch.empty(num_rows * block_d, dtype=torch.float32, device=qkv.device)
    weights = torch.empty(num_rows, dtype=torch.float32, device=qkv.device)
    _paged_attention_kernel[launch.pieces.shape[0], num_kv_heads](
        qkv,
        units,
        scales,
        batch.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        launch.pieces,
        launch.counts,
        out,
        partials,
        weights,
        sinks,
        scale,
        qkv.stride(0),
        batch.block_tables.stride(0),
        units.stride(0),
        0 if scales is None else scales.stride(0),
        TILE=KEY_TILE,
        PAGE_STRIDE=page_nbytes // units.element_size(),
        SCALE_PAGE_STRIDE=page_nbytes // SCALE_NBYTES,
        HEAD_PAGES=kv_cache.head_pages,
        LARGEST=kv_cache.format.largest,
        PARTS=parts,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=cap,
        **launch_options(launch.rows, num_units * units.element_size()),
        **sizes,
    )
    sizes["PARTIALS"] = REDUCED_AT_ONCE
    reduce_partials(launch, partials, weights, batch.query_start, out, sinks, sizes)


def reduce_partials(
    launch: Launch,
    partials: Tensor,
    weights: Tensor,
    query_start: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    sizes: dict[str, int],
) -> None:
    """Merge the partial results of a launch, if there are any, into rows of `out`."""
    num_rows = launch.reductions.shape[0] * sizes["NUM_KV_HEADS"] * launch.num_merged_rows
    _reduce_kernel[(min(num_rows, MAX_REDUCERS),)](
        partials,
        weights,
        query_start,
        launch.reductions,
        launch.counts,
        out,
        sinks,
        launch.num_merged_rows,
        num_warps=4,
        **sizes,
    )
