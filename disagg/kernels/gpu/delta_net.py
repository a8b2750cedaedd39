"""Gated delta nets as one Triton kernel: convolution, gated delta rule and recurrent state.

A program has a head of a sequence: its state stays in registers while the tokens of the step go by
one after the other. For steps of few tokens, that is what there is to do; a prompt waits for its
tokens, as many at a time as there are sequences and heads.
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
_STEP_TENSORS = ["query_start_ptr", "context_lens_ptr", "table_rows_ptr", "tables_ptr"]
_EPS = tl.constexpr(1e-6)  # of the norms of queries and keys


@triton.jit
def _convolved(
    x_ptr, last_ptr, taps_ptr, token, token_stride, channel, inside, is_old, TAPS: tl.constexpr
):
    """Channels of a token after the causal convolution and SiLU.

    x_ptr, taps_ptr, last_ptr: of the first channel in the first token, in the taps, and in the
        state, which has the tokens before the first one.
    """
    summed = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        place = token + tap - (TAPS - 1)
        is_before = is_old & (place < 0)
        x = tl.load(x_ptr + place * token_stride + channel, mask=inside & (place >= 0), other=0.0)
        kept = channel * (TAPS - 1) + TAPS - 1 + place
        last = tl.load(last_ptr + kept, mask=is_before, other=0.0)
        weight = tl.load(taps_ptr + channel * TAPS + tap, mask=inside, other=0.0)
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
    inside,
    is_old,
    TAPS: tl.constexpr,
):
    """Write the last tokens' channels to the new state. It may lie where the old one is, so what
    goes one place to the left is read before it is overwritten."""
    for tap in tl.static_range(TAPS - 1):
        place = num_tokens + tap - (TAPS - 1)
        is_before = is_old & (place < 0)
        x = tl.load(x_ptr + place * token_stride + channel, mask=inside & (place >= 0), other=0.0)
        kept = channel * (TAPS - 1) + TAPS - 1 + place
        last = tl.load(last_ptr + kept, mask=is_before, other=0.0)
        tl.store(kept_ptr + channel * (TAPS - 1) + tap, x.to(tl.float32) + last, mask=inside)


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
    gate_stride,
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
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start_ptr + sequence)
    num_tokens = tl.load(query_start_ptr + sequence + 1) - begin
    length = tl.load(context_lens_ptr + sequence)
    start = length - num_tokens
    value = tl.arange(0, BLOCK_V)
    out_ptr += (begin.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + value
    if length == 0:  # rows of nobody, with which a captured graph is filled up
        for token in range(tl.minimum(num_tokens, num_rows - begin)):
            nothing = tl.zeros([BLOCK_V], dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * NUM_HEADS * VALUE_DIM, nothing, mask=value < VALUE_DIM)
        return
    if num_tokens == 0:
        return
    row = sequence.to(tl.int64)
    if table_rows_ptr is not None:
        row = tl.load(table_rows_ptr + sequence)
    place = first_head + head
    table_ptr = tables_ptr + row * table_stride + (FIRST_GROUP + place // HELD) * num_columns
    before = tl.load(table_ptr + tl.maximum(start - 1, 0) // BLOCK_SIZE).to(tl.int64)
    after = tl.load(table_ptr + (length - 1) // BLOCK_SIZE).to(tl.int64)
    before_ptr = states_ptr + before * block_stride + place % HELD * STATE_NUMEL
    after_ptr = states_ptr + after * block_stride + place % HELD * STATE_NUMEL

    k_channel, v_channel = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_k, is_v = k_channel < KEY_DIM, v_channel < VALUE_DIM
    matrix = k_channel[:, None] * VALUE_DIM + v_channel[None, :]
    is_value = is_k[:, None] & is_v[None, :]
    is_old = start > 0  # what lies there otherwise is somebody else's
    state = tl.load(before_ptr + matrix, mask=is_value & is_old, other=0.0)

    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    q_first, k_first = key_head * KEY_DIM, (NUM_KEY_HEADS + key_head) * KEY_DIM
    v_first = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
    x_ptr = mixed_ptr + begin.to(tl.int64) * token_stride
    last_ptr = before_ptr + KEY_DIM * VALUE_DIM
    v_last = 2 * KEY_DIM * (TAPS - 1)  # the state has the channels of q, of k and of v
    is_old_k, is_old_v = is_k & is_old, is_v & is_old
    for token in range(num_tokens):
        q = _convolved(
            x_ptr + q_first, last_ptr, taps_ptr + q_first * TAPS, token, token_stride, k_channel,
            is_k, is_old_k, TAPS,
        )  # fmt: skip
        k = _convolved(
            x_ptr + k_first, last_ptr + KEY_DIM * (TAPS - 1), taps_ptr + k_first * TAPS, token,
            token_stride, k_channel, is_k, is_old_k, TAPS,
        )  # fmt: skip
        v = _convolved(
            x_ptr + v_first, last_ptr + v_last, taps_ptr + v_first * TAPS, token, token_stride,
            v_channel, is_v, is_old_v, TAPS,
        )  # fmt: skip
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        gate = (begin + token).to(tl.int64) * gate_stride + head
        state *= tl.exp(tl.load(decay_ptr + gate))
        error = v - tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * (tl.load(beta_ptr + gate) * error)[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        target = out_ptr + token * NUM_HEADS * VALUE_DIM
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_v)

    tl.debug_barrier()  # the old state, which other lanes have read, may be overwritten
    tl.store(after_ptr + matrix, state, mask=is_value)
    kept_ptr = after_ptr + KEY_DIM * VALUE_DIM
    _keep_last(
        x_ptr + q_first, last_ptr, kept_ptr, num_tokens, token_stride, k_channel, is_k, is_old_k,
        TAPS,
    )  # fmt: skip
    _keep_last(
        x_ptr + k_first, last_ptr + KEY_DIM * (TAPS - 1), kept_ptr + KEY_DIM * (TAPS - 1),
        num_tokens, token_stride, k_channel, is_k, is_old_k, TAPS,
    )  # fmt: skip
    _keep_last(
        x_ptr + v_first, last_ptr + v_last, kept_ptr + v_last, num_tokens, token_stride, v_channel,
        is_v, is_old_v, TAPS,
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
    decay, beta = decay.contiguous(), beta.contiguous()
    if not mixed.shape[0]:
        return out
    num_columns = batch.block_tables.shape[1] // kv_cache.num_groups
    _delta_net_kernel[num_seqs, heads.num_heads](
        mixed,
        decay,
        beta,
        taps,
        states.values,
        out,
        batch.query_start,
        batch.context_lens,
        batch.table_rows,
        batch.block_tables,
        mixed.shape[0],
        mixed.stride(0),
        decay.stride(0),
        batch.block_tables.stride(0),
        num_columns,
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
        BLOCK_K=next_power_of_2(heads.key_dim),
        BLOCK_V=next_power_of_2(heads.value_dim),
        TAPS=heads.taps,
        num_warps=NUM_WARPS,
    )
    return out
