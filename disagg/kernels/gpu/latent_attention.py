"""Attention to latents in a paged cache, in Triton: decoding, verification and prompts.

The work is cut into pieces and reduced as in `paged_attention`. Two things differ. All query heads
attend to the same vector of a token, so each program computes several heads. And the first values
of that vector are both key and value, so a tile of them is loaded once for the scores and for the
weighted sum. The last values, which have rotary positions, are a second tile, because tile sizes
are powers of two (512 and 64 for DeepSeek).

If an index has chosen the tokens that a query attends to (`token_index`), key i of a query is the
i-th token that was chosen for it, wherever that lies. All else is the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.attention_work import AttentionWork, Launch
from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.paged_attention import _NOTHING_SEEN, _STEP_TENSORS, reduce_partials
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch

LONG_ROWS = 64  # queries in a prompt's tile: registers hold no more sums of 512 values
# Keys of an inner step: 32 need 144 KB of shared memory, 16 need 92.
MIN_TILE, MAX_TILE = 16, 32
REDUCED_AT_ONCE = 16  # partial results; their rows are four times as wide as in other attention


@triton.jit
def _latent_tile(
    latent_q,
    turned_q,
    acc,
    total,
    peak,
    start,
    pages,
    seen,
    chosen_ptr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys [start, start + TILE) to the running softmax of all rows; see `attend_tile`."""
    pages_ptr, table_ptr, block_stride = pages
    positions, context, scale = seen
    keys = start + tl.arange(0, TILE)
    columns, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    written = keys < context
    if chosen_ptr is not None:
        if MASKED:
            places = tl.load(chosen_ptr + keys, mask=written, other=0)
        else:
            places = tl.load(chosen_ptr + keys)
        page = tl.load(table_ptr + places // BLOCK_SIZE).to(tl.int64)
        offset = places % BLOCK_SIZE
    elif BLOCK_SIZE % TILE == 0:  # one page per tile: a single contiguous run of memory
        page = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        offset = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        page = tl.load(table_ptr + keys // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        offset = keys % BLOCK_SIZE
    vectors = (page * block_stride + offset * VECTOR)[:, None]
    # Slots that were never written may be NaN, and 0 * NaN is NaN, so load zeros there.
    inside, inside_turned = (columns < RANK)[None, :], (turned < ROPE)[None, :]
    if MASKED:
        inside, inside_turned = inside & written[:, None], inside_turned & written[:, None]
    if MASKED or RANK != BLOCK_RANK:
        latents = tl.load(pages_ptr + vectors + columns[None, :], mask=inside, other=0.0)
    else:
        latents = tl.load(pages_ptr + vectors + columns[None, :])
    if MASKED or ROPE != BLOCK_ROPE:
        turned_keys = tl.load(
            pages_ptr + vectors + RANK + turned[None, :], mask=inside_turned, other=0.0
        )
    else:
        turned_keys = tl.load(pages_ptr + vectors + RANK + turned[None, :])
    scores = tl.dot(turned_q, tl.trans(turned_keys), input_precision="ieee")
    scores = tl.dot(latent_q, tl.trans(latents), scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(latents.dtype), latents, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[*_STEP_TENSORS, "chosen_ptr"],
)
def _latent_attention_kernel(
    heads_ptr,
    pages_ptr,
    tables_ptr,
    table_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    pieces_ptr,
    counts_ptr,
    chosen_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    scale,
    token_stride,
    table_stride,
    block_stride,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # The groups of a piece stand side by side, so that they find its latents in the cache.
    group, piece = tl.program_id(0), tl.program_id(1)
    num_last = tl.num_programs(1) - tl.load(counts_ptr + 1)
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
    columns, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    query = row // GROUP
    is_used = query < num_queries
    used = is_used[:, None] & (columns < RANK)[None, :]
    used_turned = is_used[:, None] & (turned < ROPE)[None, :]
    token = (first_token + first_query + query).to(tl.int64)
    first_position = context - query_len + first_query
    positions = first_position + query
    head = group * GROUP + row % GROUP
    q_ptrs = (heads_ptr + token * token_stride + head * VECTOR)[:, None]
    latent_q = tl.load(q_ptrs + columns[None, :], mask=used, other=0.0)
    turned_q = tl.load(q_ptrs + RANK + turned[None, :], mask=used_turned, other=0.0)

    # Every row sees the keys before `full_end`; tiles from there on are masked.
    full_end = tl.minimum((first_position + 1) // TILE * TILE, end_key // TILE * TILE)
    full_end = tl.maximum(full_end, first_key)
    acc = tl.zeros([ROWS, BLOCK_RANK], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.zeros([ROWS], dtype=tl.float32) + _NOTHING_SEEN
    table_row = sequence.to(tl.int64)
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + sequence)
    table_ptr = tables_ptr + table_row * table_stride
    pages, seen = (pages_ptr, table_ptr, block_stride), (positions, context, scale)
    if chosen_ptr is not None:
        chosen_ptr += first_token.to(tl.int64) * NUM_CHOSEN
    for start in range(first_key, full_end, TILE):
        acc, total, peak = _latent_tile(
            latent_q, turned_q, acc, total, peak, start, pages, seen, chosen_ptr,
            RANK, ROPE, VECTOR, BLOCK_RANK, BLOCK_ROPE, TILE, BLOCK_SIZE, False,
        )  # fmt: skip
    for start in range(full_end, end_key, TILE):
        acc, total, peak = _latent_tile(
            latent_q, turned_q, acc, total, peak, start, pages, seen, chosen_ptr,
            RANK, ROPE, VECTOR, BLOCK_RANK, BLOCK_ROPE, TILE, BLOCK_SIZE, True,
        )  # fmt: skip

    divisor = tl.where(total > 0.0, total, 1.0)
    result = acc * (1.0 / divisor)[:, None]  # dividing each value would spill registers
    slot = (partial * NUM_GROUPS + group) * ROWS + row
    if partial < 0:
        target = (token * (NUM_GROUPS * GROUP) + head) * RANK
        target = target[:, None] + columns[None, :]
        tl.store(out_ptr + target, result.to(out_ptr.dtype.element_ty), mask=used)
    else:
        tl.store(partial_ptr + slot[:, None] * BLOCK_RANK + columns[None, :], result, mask=used)
        tl.store(weight_ptr + slot, peak + tl.log2(divisor), mask=is_used)


def key_tile(block_size: int, most: int = MAX_TILE, *, are_chosen: bool = False) -> int:
    """The number of keys of an inner step; they are in one page if possible.

    32 keys of several pages would not fit into the registers.
    """
    return most if block_size % most == 0 and not are_chosen else MIN_TILE


def launch_options(rows: int) -> dict[str, int]:
    """Warps and pipeline depth for a query tile of so many rows."""
    return {"num_warps": 4 if rows <= 16 else 8, "num_stages": 2}


def latent_attention(
    heads: Tensor,
    kv_cache: KVPages,
    layer: int,
    batch: PagedBatch,
    work: AttentionWork,
    value_dim: int,
    scale: float,
    max_tile: int = MAX_TILE,
    index_dim: int = 0,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend causally to vectors in the cache, the step's own included.

    Args:
        heads: [num_tokens, num_heads + 1, head_dim]: the queries, and last the token's cached
            vector, which is not read here.
        work: from `attention_work`, cut for this step, for groups of `latent_group` heads.
            With `chosen`, `batch` and `work` are those of a `TokenChoice`.
        value_dim: the first `value_dim` values of a cached vector are its value.
        scale: scores are multiplied by this before the softmax.
        max_tile: `MIN_TILE` on a GPU that has less shared memory than `MAX_TILE` needs.
        index_dim: the last values of a vector, which belong to an index and to no key.
        chosen: int32 [num_tokens, num_chosen], positions of the tokens that each token attends to;
            None: it attends to all that it sees.

    Returns:
        [num_tokens, num_heads, value_dim].
    """
    num_heads = heads.shape[1] - 1
    out = torch.empty(heads.shape[0], num_heads, value_dim, dtype=heads.dtype, device=heads.device)
    for launch in work.launches:
        factor = scale * math.log2(math.e)
        _run(launch, heads, kv_cache, layer, batch, out, factor, max_tile, index_dim, chosen)
    return out


def _run(
    launch: Launch,
    heads: Tensor,
    kv_cache: KVPages,
    layer: int,
    batch: PagedBatch,
    out: Tensor,
    scale: float,
    max_tile: int,
    index_dim: int,
    chosen: Tensor | None,
) -> None:
    """Compute the pieces of one launch, then merge the pieces that belong to one sequence."""
    _, num_heads, rank = out.shape
    group, pages = launch.group, kv_cache.layers[layer].values
    num_groups, block_rank = num_heads // group, max(16, next_power_of_2(rank))
    num_rows = launch.num_partials * num_groups * launch.rows
    partials = torch.empty(num_rows * block_rank, dtype=torch.float32, device=out.device)
    weights = torch.empty(num_rows, dtype=torch.float32, device=out.device)
    rope = kv_cache.head_dim - index_dim - rank
    _latent_attention_kernel[num_groups, launch.pieces.shape[0]](
        heads,
        pages,
        batch.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        launch.pieces,
        launch.counts,
        chosen,
        out,
        partials,
        weights,
        scale,
        heads.stride(0),
        batch.block_tables.stride(0),
        pages.stride(0),
        NUM_GROUPS=num_groups,
        GROUP=group,
        ROWS=launch.rows,
        NUM_CHOSEN=0 if chosen is None else chosen.shape[1],
        RANK=rank,
        ROPE=rope,
        VECTOR=kv_cache.head_dim,
        BLOCK_RANK=block_rank,
        BLOCK_ROPE=max(16, next_power_of_2(rope)),
        TILE=key_tile(kv_cache.values.shape[4], max_tile, are_chosen=chosen is not None),
        BLOCK_SIZE=kv_cache.values.shape[4],
        **launch_options(launch.rows),
    )
    sizes = {
        "NUM_KV_HEADS": num_groups,
        "GROUP": group,
        "ROWS": launch.rows,
        "HEAD_DIM": rank,
        "BLOCK_D": block_rank,
        "PARTIALS": REDUCED_AT_ONCE,
    }
    reduce_partials(launch, partials, weights, batch.query_start, out, None, sizes)
