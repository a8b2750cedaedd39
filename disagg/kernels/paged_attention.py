"""Attention over a paged cache in Triton: one kernel for decoding, verification and prompts.

A program takes one piece of work (`attention_work`) and one KV head. The queries that share the
head are packed into the rows of one tile, so grouped queries read each key once; tiles of keys
that every row sees skip all masking. Softmax is kept in base 2. Pieces of one sequence are
reduced in a fixed order, so a result does not depend on timing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.attention_tile import attend_tile
from disagg.kernels.attention_work import Piece, Reduction, split_keys, split_queries
from disagg.kernels.kv_pages import SCALE_NBYTES, KVPages
from disagg.kernels.launcher import Launcher, next_power_of_2

KEY_TILE = 64
MAX_SHORT_ROWS = 64  # packed query rows up to which keys are cut rather than queries
LONG_ROWS = 128
_NOTHING_SEEN = tl.constexpr(-1.0e30)  # finite, so that a row that has seen nothing has no NaN


# These are parts of one upload and change from step to step: neither their alignment nor their
# length may choose another compilation.
_STEP_TENSORS = ("tables_ptr", "query_start_ptr", "context_lens_ptr", "reductions_ptr")


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_STEP_TENSORS)
def _paged_attention_kernel(
    qkv_ptr,
    pages_ptr,
    scales_ptr,
    tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    pieces_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
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
    LARGEST: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    piece_ptr = pieces_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    sequence = tl.load(piece_ptr)
    first_query, num_queries = tl.load(piece_ptr + 1), tl.load(piece_ptr + 2)
    first_key, end_key = tl.load(piece_ptr + 3), tl.load(piece_ptr + 4)
    partial = tl.load(piece_ptr + 5).to(tl.int64)
    first_token = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - first_token
    context = tl.load(context_lens_ptr + sequence)

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    query = row // GROUP
    used = (query < num_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    token = (first_token + first_query + query).to(tl.int64)
    first_position = context - query_len + first_query
    positions = first_position + query
    heads = (head * GROUP + row % GROUP) * HEAD_DIM
    q = tl.load(
        qkv_ptr + (token * token_stride + heads)[:, None] + columns[None, :], mask=used, other=0.0
    )

    if pages_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # what e4m3 is widened to in one instruction for two

    # Keys in [full_start, full_end) are seen by every row; tiles around them are masked.
    oldest = 0
    full_start = first_key
    if WINDOW > 0:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
        newest_start = tl.maximum(first_position + num_queries - WINDOW, 0)
        full_start = tl.maximum(tl.cdiv(newest_start, TILE) * TILE, first_key)
    full_end = tl.minimum((first_position + 1) // TILE * TILE, end_key // TILE * TILE)
    full_end = tl.maximum(full_end, full_start)

    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.zeros([ROWS], dtype=tl.float32) + _NOTHING_SEEN
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    page_ptr = pages_ptr + head * PAGE_STRIDE
    if LARGEST != 0.0:
        scales_ptr += head * SCALE_PAGE_STRIDE
    if WINDOW > 0:
        for start in range(first_key, tl.minimum(full_start, end_key), TILE):
            acc, total, peak = attend_tile(
                q, acc, total, peak, start, page_ptr, table_ptr, positions, oldest, context,
                scale, block_stride, scales_ptr, scale_block_stride,
                NUM_KV_HEADS, PAGE_STRIDE, SCALE_PAGE_STRIDE, LARGEST, PACKED,
                TILE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW, True,
            )  # fmt: skip
    for start in range(full_start, full_end, TILE):
        acc, total, peak = attend_tile(
            q, acc, total, peak, start, page_ptr, table_ptr, positions, oldest, context,
            scale, block_stride, scales_ptr, scale_block_stride,
            NUM_KV_HEADS, PAGE_STRIDE, SCALE_PAGE_STRIDE, LARGEST, PACKED,
            TILE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW, False,
        )  # fmt: skip
    for start in range(full_end, end_key, TILE):
        acc, total, peak = attend_tile(
            q, acc, total, peak, start, page_ptr, table_ptr, positions, oldest, context,
            scale, block_stride, scales_ptr, scale_block_stride,
            NUM_KV_HEADS, PAGE_STRIDE, SCALE_PAGE_STRIDE, LARGEST, PACKED,
            TILE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, WINDOW, True,
        )  # fmt: skip

    if LARGEST != 0.0:
        acc /= LARGEST
    acc /= tl.where(total > 0.0, total, 1.0)[:, None]
    if partial < 0:
        target = (token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads)[:, None] + columns[None, :]
        tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=used)
    else:
        slot = (partial * NUM_KV_HEADS + head) * ROWS + row
        tl.store(partial_ptr + slot[:, None] * BLOCK_D + columns[None, :], acc)
        tl.store(weight_ptr + slot, peak + tl.log2(tl.where(total > 0.0, total, 1.0)))


@triton.jit(do_not_specialize_on_alignment=_STEP_TENSORS)
def _reduce_kernel(
    partial_ptr,
    weight_ptr,
    query_start_ptr,
    reductions_ptr,
    out_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the partial softmaxes of one sequence and KV head, first to last."""
    reduction_ptr = reductions_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    sequence = tl.load(reduction_ptr)
    first_partial, num_partials = tl.load(reduction_ptr + 1), tl.load(reduction_ptr + 2)
    num_queries = tl.load(reduction_ptr + 3)
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.zeros([ROWS], dtype=tl.float32) + _NOTHING_SEEN
    for index in range(num_partials):
        partial = (first_partial + index).to(tl.int64)
        slot = (partial * NUM_KV_HEADS + head) * ROWS + row
        weight = tl.load(weight_ptr + slot)
        new_peak = tl.maximum(peak, weight)
        decay, gain = tl.exp2(peak - new_peak), tl.exp2(weight - new_peak)
        piece = tl.load(partial_ptr + slot[:, None] * BLOCK_D + columns[None, :])
        acc = acc * decay[:, None] + piece * gain[:, None]
        total = total * decay + gain
        peak = new_peak
    query = row // GROUP
    used = (query < num_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    token = (tl.load(query_start_ptr + sequence) + query).to(tl.int64)
    heads = (head * GROUP + row % GROUP) * HEAD_DIM
    target = (token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads)[:, None] + columns[None, :]
    acc /= tl.where(total > 0.0, total, 1.0)[:, None]  # an empty reduction adds up to nothing
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=used)


_paged_attention = Launcher(_paged_attention_kernel)
_reduce = Launcher(_reduce_kernel)


def launch_options(rows: int, vector_nbytes: int) -> dict[str, int]:
    """Warps and pipeline depth for a query tile of `rows` and keys of `vector_nbytes`.

    A tile's address waits for its page number, and that load takes two of the stages: five are
    needed for two tiles of keys and values in shared memory, one in use and one on its way.
    """
    return {
        "num_warps": 4 if rows <= MAX_SHORT_ROWS else 8,
        "num_stages": 5 if vector_nbytes <= 256 else 3,
    }


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: its pieces on the device, and the rows of a query tile."""

    pieces: Tensor  # int32 [num_pieces, 6]
    reductions: Tensor  # int32 [num_reductions, 4]
    num_partials: int  # room for so many
    rows: int


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Everything about one step and one window that its layers share."""

    launches: tuple[Launch, ...]
    window: int | None


def plan_work(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    group: int,
    window: int | None,
    num_programs: int,
    device: torch.device,
) -> PagedWork:
    """Cut a step into pieces and put the lists on the device.

    Args:
        group: query heads per KV head.
        num_programs: pieces per KV head that fill the device.
    """
    rows = [
        (sequence, *lens)
        for sequence, lens in enumerate(zip(query_lens, context_lens, strict=True))
    ]
    short = [row for row in rows if row[1] * group <= MAX_SHORT_ROWS]
    long = [row for row in rows if row[1] * group > MAX_SHORT_ROWS]
    launches = []
    if short:
        height = max(16, next_power_of_2(max(row[1] for row in short) * group))
        pieces, reductions = split_keys(short, window, KEY_TILE, num_programs)
        launches.append(_launch(pieces, reductions, height, device))
    if long:
        height = max(LONG_ROWS, next_power_of_2(group))
        pieces = split_queries(long, window, KEY_TILE, height // group)
        launches.append(_launch(pieces, [], height, device))
    return PagedWork(tuple(launches), window)


def _launch(
    pieces: list[Piece], reductions: list[Reduction], rows: int, device: torch.device
) -> Launch:
    numbers: list[int] = []
    for p in pieces:
        numbers += (p.sequence, p.first_query, p.num_queries, p.start, p.end, p.partial)
    for r in reductions:
        numbers += (r.sequence, r.first_partial, r.num_partials, r.num_queries)
    uploaded = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cuda":
        uploaded = uploaded.pin_memory().to(device, non_blocking=True)
    num_first = len(pieces) * 6
    return Launch(
        pieces=uploaded[:num_first].view(-1, 6),
        reductions=uploaded[num_first:].view(-1, 4),
        num_partials=sum(merge.num_partials for merge in reductions),
        rows=rows,
    )


def paged_attention(
    qkv: Tensor,
    kv_cache: KVPages,
    layer: int,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    work: PagedWork,
) -> Tensor:
    """Attend causally to keys and values in the cache, the step's own included.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], of which the queries are read.
        block_tables, query_start, context_lens: int32, as in `models.batch.Batch`.
        work: from `plan_work`.

    Returns:
        [num_tokens, num_heads * head_dim].
    """
    num_heads = qkv.shape[1] - 2 * kv_cache.values.shape[3]
    out = torch.empty(qkv.shape[0], num_heads * qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    step = (block_tables, query_start, context_lens)
    for launch in work.launches:
        _run(launch, qkv, kv_cache, layer, step, work.window, out)
    return out


def _run(
    launch: Launch,
    qkv: Tensor,
    kv_cache: KVPages,
    layer: int,
    step: tuple[Tensor, Tensor, Tensor],
    window: int | None,
    out: Tensor,
) -> None:
    """Compute the pieces of one launch, then merge those that are parts of a sequence."""
    values, head_dim = kv_cache.values, kv_cache.head_dim
    layer_values, layer_scales = kv_cache.layers[layer]
    num_kv_heads, block_size, stored_dim = values.shape[3:]
    block_tables, query_start, _ = step
    block_d = max(16, next_power_of_2(head_dim))
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": qkv.shape[1] // num_kv_heads - 2,
        "ROWS": launch.rows,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
    }
    num_rows = launch.num_partials * num_kv_heads * launch.rows
    buffer = torch.empty(num_rows * (block_d + 1), dtype=torch.float32, device=qkv.device)
    partials, weights = buffer[: num_rows * block_d], buffer[num_rows * block_d :]
    _paged_attention(
        (launch.pieces.shape[0], num_kv_heads),
        qkv,
        layer_values,
        layer_scales,
        *step,
        launch.pieces,
        out,
        partials,
        weights,
        head_dim**-0.5 * math.log2(math.e),
        qkv.stride(0),
        block_tables.stride(0),
        values.stride(0),
        0 if layer_scales is None else layer_scales.stride(0),
        TILE=KEY_TILE,
        PAGE_STRIDE=kv_cache.page_stride,
        SCALE_PAGE_STRIDE=kv_cache.page_stride // SCALE_NBYTES,
        LARGEST=kv_cache.format.largest,
        PACKED=kv_cache.format.packed,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        **launch_options(launch.rows, stored_dim * values.element_size()),
        **sizes,
    )
    if launch.num_partials:
        grid = (launch.reductions.shape[0], num_kv_heads)
        _reduce(grid, partials, weights, query_start, launch.reductions, out, num_warps=4, **sizes)
