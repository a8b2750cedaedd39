"""Gated delta nets as Triton kernels: convolution, gated delta rule and recurrent state.

A program has a head of a sequence, or some values of it, whose state stays in registers. Sequences
with few tokens in a step are computed one token after the other, and prompts in chunks, as products
of matrices (see `kernels.torch.delta_net`). What the convolution needs of the last tokens is
written by the later launch, of tokens: programs of chunks share it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch

NUM_WARPS = 4  # a thread has 128 numbers of a state of 128 x 128
CHUNK = 16  # tokens; the least that units for matrices multiply
CHUNK_TILE, CHUNK_WARPS = 16, 8  # values of a head in a program
MOST = 2**31 - 1
_STEP_TENSORS = ["query_start_ptr", "context_lens_ptr", "table_rows_ptr", "tables_ptr"]
_EPS = tl.constexpr(1e-6)  # of the norms of queries and keys


@triton.jit
def _place(
    states_ptr,
    query_start_ptr,
    context_lens_ptr,
    table_rows_ptr,
    tables_ptr,
    table_stride,
    num_columns,
    block_stride,
    place,
    FIRST_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HELD: tl.constexpr,
    STATE_NUMEL: tl.constexpr,
):
    """Of a sequence's tokens in the step: the first row, their number, and the number of tokens
    before them; and where a head's state before and after them lies. The number is 0 for a row of
    sequences that has none.

    place: of the head among those of all layers.
    """
    sequence = tl.program_id(0)
    begin = tl.load(query_start_ptr + sequence)
    num_tokens = tl.load(query_start_ptr + sequence + 1) - begin
    length = tl.load(context_lens_ptr + sequence)
    num_tokens = tl.where(length == 0, 0, num_tokens)
    row = sequence.to(tl.int64)
    if table_rows_ptr is not None:
        row = tl.load(table_rows_ptr + sequence)
    is_there = num_tokens > 0
    table_ptr = tables_ptr + row * table_stride + (FIRST_GROUP + place // HELD) * num_columns
    start = length - num_tokens
    first, last = tl.maximum(start - 1, 0) // BLOCK_SIZE, tl.maximum(length - 1, 0) // BLOCK_SIZE
    before = tl.load(table_ptr + first, mask=is_there, other=0).to(tl.int64)
    after = tl.load(table_ptr + last, mask=is_there, other=0).to(tl.int64)
    own = place % HELD * STATE_NUMEL
    before_ptr = states_ptr + before * block_stride + own
    after_ptr = states_ptr + after * block_stride + own
    return begin.to(tl.int64), num_tokens, start, before_ptr, after_ptr


@triton.jit
def _convolved(
    x_ptr,
    last_ptr,
    taps_ptr,
    token,
    num_tokens,
    token_stride,
    channel,
    is_channel,
    is_old,
    TAPS: tl.constexpr,
):
    """Channels of one or more tokens after the causal convolution and SiLU.

    x_ptr, taps_ptr, last_ptr: of the first channel in the first token, in the taps, and in the
        state, which has the tokens before the first one.
    is_old: whether there are such tokens.
    """
    summed = 0.0
    for tap in tl.static_range(TAPS):
        place = token + tap - (TAPS - 1)
        is_token = is_channel & (token < num_tokens)
        is_now, is_before = is_token & (place >= 0), is_token & is_old & (place < 0)
        x = tl.load(x_ptr + place * token_stride + channel, mask=is_now, other=0.0)
        kept = channel * (TAPS - 1) + TAPS - 1 + place
        last = tl.load(last_ptr + kept, mask=is_before, other=0.0)
        weight = tl.load(taps_ptr + channel * TAPS + tap, mask=is_channel, other=0.0)
        summed += (x.to(tl.float32) + last) * weight.to(tl.float32)
    return summed / (1.0 + tl.exp(-summed))


@triton.jit
def _keep_last(
    x_ptr,
    last_ptr,
    kept_ptr,
    num_tokens,
    token_stride,
    channel,
    is_channel,
    is_old,
    TAPS: tl.constexpr,
):
    """Write the last tokens' channels to the new state. It may lie where the old one is, so what
    goes one place to the left is read before it is overwritten."""
    for tap in tl.static_range(TAPS - 1):
        place = num_tokens + tap - (TAPS - 1)
        is_now, is_before = is_channel & (place >= 0), is_channel & is_old & (place < 0)
        x = tl.load(x_ptr + place * token_stride + channel, mask=is_now, other=0.0)
        kept = channel * (TAPS - 1) + TAPS - 1 + place
        last = tl.load(last_ptr + kept, mask=is_before, other=0.0)
        tl.store(kept_ptr + channel * (TAPS - 1) + tap, x.to(tl.float32) + last, mask=is_channel)


@triton.jit
def _product(left, right):
    """Of inputs with 10 bits, as `mixed` has 8 where tensor cores multiply; sums are in float32."""
    return tl.dot(left, right, input_precision="tf32")


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP_TENSORS)
def _delta_net_kernel(
    mixed_ptr,
    decay_ptr,
    beta_ptr,
    taps_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    context_lens_ptr,
    table_rows_ptr,
    tables_ptr,
    num_rows,
    token_stride,
    table_stride,
    num_columns,
    block_stride,
    first_head,
    FIRST_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HELD: tl.constexpr,
    STATE_NUMEL: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    LONG: tl.constexpr,
):
    """CHUNK: tokens that are computed together, of sequences with at least as many; 1: one after
    the other, of sequences with fewer than `LONG`."""
    head = tl.program_id(1)
    begin, num_tokens, start, before_ptr, after_ptr = _place(
        states_ptr, query_start_ptr, context_lens_ptr, table_rows_ptr, tables_ptr, table_stride,
        num_columns, block_stride, first_head + head, FIRST_GROUP, BLOCK_SIZE, HELD, STATE_NUMEL,
    )  # fmt: skip
    k_channel = tl.arange(0, BLOCK_K)
    v_channel = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = k_channel < KEY_DIM, v_channel < VALUE_DIM
    out_ptr += (begin * NUM_HEADS + head) * VALUE_DIM
    if CHUNK == 1:
        if num_tokens == 0:
            # Rows of nobody, with which a captured graph is filled up, are those of a sequence
            # without context.
            end = tl.load(query_start_ptr + tl.program_id(0) + 1)
            for row in range(begin, tl.minimum(end, num_rows)):
                nothing = tl.zeros([BLOCK_V], dtype=out_ptr.dtype.element_ty)
                target = out_ptr + (row - begin) * NUM_HEADS * VALUE_DIM + v_channel
                tl.store(target, nothing, mask=is_v)
            return
    elif num_tokens < CHUNK:
        return

    matrix = k_channel[:, None] * VALUE_DIM + v_channel[None, :]
    is_value = is_k[:, None] & is_v[None, :]
    is_old = start > 0  # what lies there otherwise is somebody else's
    is_here = (CHUNK > 1) | (num_tokens < LONG)
    state = tl.load(before_ptr + matrix, mask=is_value & is_old & is_here, other=0.0)

    stride = token_stride.to(tl.int64)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    q_first, k_first = key_head * KEY_DIM, (NUM_KEY_HEADS + key_head) * KEY_DIM
    v_first = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
    x_ptr = mixed_ptr + begin * stride
    # The state has the channels of q, of k and of v.
    last_ptr, k_last = before_ptr + KEY_DIM * VALUE_DIM, KEY_DIM * (TAPS - 1)
    decay_ptr += begin * NUM_HEADS + head
    beta_ptr += begin * NUM_HEADS + head
    if CHUNK == 1:
        for token in range(tl.where(is_here, num_tokens, 0)):
            q = _convolved(
                x_ptr + q_first, last_ptr, taps_ptr + q_first * TAPS, token, num_tokens, stride,
                k_channel, is_k, is_old, TAPS,
            )  # fmt: skip
            k = _convolved(
                x_ptr + k_first, last_ptr + k_last, taps_ptr + k_first * TAPS, token, num_tokens,
                stride, k_channel, is_k, is_old, TAPS,
            )  # fmt: skip
            v = _convolved(
                x_ptr + v_first, last_ptr + 2 * k_last, taps_ptr + v_first * TAPS, token,
                num_tokens, stride, v_channel, is_v, is_old, TAPS,
            )  # fmt: skip
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * (KEY_DIM**-0.5)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
            state *= tl.exp(tl.load(decay_ptr + token * NUM_HEADS))
            error = v - tl.sum(state * k[:, None], axis=0)
            state += k[:, None] * (tl.load(beta_ptr + token * NUM_HEADS) * error)[None, :]
            out = tl.sum(state * q[:, None], axis=0)
            target = out_ptr + token * NUM_HEADS * VALUE_DIM + v_channel
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_v)
    else:
        place = tl.arange(0, CHUNK)
        is_up_to, is_itself = place[:, None] >= place[None, :], place[:, None] == place[None, :]
        k_row, v_row = k_channel[None, :], v_channel[None, :]
        for first in range(0, num_tokens, CHUNK):
            token = first + place
            is_token, rows = token < num_tokens, token[:, None]
            q = _convolved(
                x_ptr + q_first, last_ptr, taps_ptr + q_first * TAPS, rows, num_tokens, stride,
                k_row, is_k[None, :], is_old, TAPS,
            )  # fmt: skip
            k = _convolved(
                x_ptr + k_first, last_ptr + k_last, taps_ptr + k_first * TAPS, rows, num_tokens,
                stride, k_row, is_k[None, :], is_old, TAPS,
            )  # fmt: skip
            v = _convolved(
                x_ptr + v_first, last_ptr + 2 * k_last, taps_ptr + v_first * TAPS, rows,
                num_tokens, stride, v_row, is_v[None, :], is_old, TAPS,
            )  # fmt: skip
            q *= (tl.rsqrt(tl.sum(q * q, axis=1) + _EPS) * (KEY_DIM**-0.5))[:, None]
            k *= tl.rsqrt(tl.sum(k * k, axis=1) + _EPS)[:, None]
            # Tokens behind the last one leave the state as it is.
            decay = tl.load(decay_ptr + token * NUM_HEADS, mask=is_token, other=0.0)
            beta = tl.load(beta_ptr + token * NUM_HEADS, mask=is_token, other=0.0)[:, None]
            total = tl.cumsum(decay, axis=0)
            between = tl.where(is_up_to, total[:, None] - total[None, :], 0.0)
            left = tl.where(is_up_to, tl.exp(between), 0.0)
            # The corrections solve a triangular system, whose inverse is made row by row.
            system = tl.where(is_itself, 0.0, beta * left * _product(k, tl.trans(k)))
            inverse = -system
            for i in range(1, CHUNK):
                row = tl.sum(tl.where((place == i)[:, None], inverse, 0.0), axis=0)
                row += tl.sum(row[:, None] * inverse, axis=0)
                inverse = tl.where((place == i)[:, None], row[None, :], inverse)
            inverse += tl.where(is_itself, 1.0, 0.0)
            grown = tl.exp(total)[:, None]
            errors = v - _product(k * grown, state)
            corrections = _product(inverse, beta * errors)
            scores = left * _product(q, tl.trans(k))
            out = _product(q * grown, state) + _product(scores, corrections)
            target = out_ptr + rows * NUM_HEADS * VALUE_DIM + v_row
            inside = is_token[:, None] & is_v[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)
            whole = tl.sum(decay, axis=0)
            at_end = k * tl.exp(whole - total)[:, None]
            state = state * tl.exp(whole) + _product(tl.trans(at_end), corrections)

    tl.debug_barrier()  # the old state, which other lanes have read, may be overwritten
    tl.store(after_ptr + matrix, state, mask=is_value & is_here)
    if CHUNK == 1:
        kept_ptr = after_ptr + KEY_DIM * VALUE_DIM
        _keep_last(
            x_ptr + q_first, last_ptr, kept_ptr, num_tokens, stride, k_channel, is_k, is_old, TAPS
        )
        _keep_last(
            x_ptr + k_first, last_ptr + k_last, kept_ptr + k_last, num_tokens, stride, k_channel,
            is_k, is_old, TAPS,
        )  # fmt: skip
        _keep_last(
            x_ptr + v_first, last_ptr + 2 * k_last, kept_ptr + 2 * k_last, num_tokens, stride,
            v_channel, is_v, is_old, TAPS,
        )  # fmt: skip


def delta_net(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    taps: Tensor,
    kv_cache: KVPages,
    layer: int,
    batch: PagedBatch,
) -> Tensor:
    """See `Ops.delta_net`. batch: of the whole step."""
    states = kv_cache.states
    assert states is not None and taps.is_contiguous() and mixed.stride(1) == 1
    heads, num_seqs = states.heads, batch.context_lens.shape[0]
    out = mixed.new_empty(mixed.shape[0], heads.num_heads, heads.value_dim)
    if not mixed.shape[0]:
        return out
    # A chunk has more tokens than the convolution needs of the last ones.
    has_long = heads.taps <= CHUNK <= batch.max_query_len
    block_v = next_power_of_2(heads.value_dim)
    tile = min(CHUNK_TILE, max(CHUNK, block_v))
    for chunk, own in ((CHUNK, tile), (1, block_v)) if has_long else ((1, block_v),):
        _delta_net_kernel[num_seqs, heads.num_heads, -(-heads.value_dim // own)](
            mixed,
            decay.contiguous(),
            beta.contiguous(),
            taps,
            states.values,
            out,
            batch.query_start,
            batch.context_lens,
            batch.table_rows,
            batch.block_tables,
            mixed.shape[0],
            mixed.stride(0),
            batch.block_tables.stride(0),
            batch.block_tables.shape[1] // kv_cache.num_groups,
            states.values.stride(0),
            kv_cache.places[layer][1] * heads.num_heads,
            FIRST_GROUP=kv_cache.num_kv_groups,
            BLOCK_SIZE=kv_cache.values.shape[4],
            HELD=states.values.shape[1],
            STATE_NUMEL=heads.state_numel,
            NUM_KEY_HEADS=heads.num_key_heads,
            NUM_HEADS=heads.num_heads,
            KEY_DIM=heads.key_dim,
            VALUE_DIM=heads.value_dim,
            BLOCK_K=max(chunk, next_power_of_2(heads.key_dim)),
            BLOCK_V=own,
            TAPS=heads.taps,
            CHUNK=chunk,
            LONG=CHUNK if has_long else MOST,
            num_warps=NUM_WARPS if chunk == 1 else CHUNK_WARPS,
        )
    return out
