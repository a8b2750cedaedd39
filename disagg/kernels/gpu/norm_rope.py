"""RMS normalisation of heads (where a family has it) and rotary embedding in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2


@triton.jit
def _norm_rope_kernel(
    heads_ptr,
    norm_ptr,
    squares_ptr,
    rope_ptr,
    eps,
    token_stride,
    HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = ROPE_DIM // 2
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    start = heads_ptr + token * token_stride + head * HEAD_STRIDE
    left = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(start + half + columns, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        square = tl.sum(left * left, axis=0) + tl.sum(right * right, axis=0)
        weight = norm_ptr + head * HEAD_DIM
        if ROPE_DIM < HEAD_DIM:
            behind = ROPE_DIM + tl.arange(0, REST_BLOCK)
            is_rest = behind < HEAD_DIM
            rest = tl.load(start + behind, mask=is_rest, other=0.0).to(tl.float32)
            square += tl.sum(rest * rest, axis=0)
        mean_square = square / HEAD_DIM
        if squares_ptr is not None:
            mean_square = tl.load(squares_ptr + token * tl.num_programs(1) + head)
        inverse = tl.rsqrt(mean_square + eps)
        left *= inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        right *= inverse * tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)
        if ROPE_DIM < HEAD_DIM:
            rest *= inverse * tl.load(weight + behind, mask=is_rest, other=0.0).to(tl.float32)
            tl.store(start + behind, rest.to(heads_ptr.dtype.element_ty), mask=is_rest)
    cos = tl.load(rope_ptr + token * ROPE_DIM + columns, mask=inside, other=0.0)
    sin = tl.load(rope_ptr + token * ROPE_DIM + half + columns, mask=inside, other=0.0)
    turned_left = left * cos - right * sin
    turned_right = right * cos + left * sin
    tl.store(start + columns, turned_left.to(heads_ptr.dtype.element_ty), mask=inside)
    tl.store(start + half + columns, turned_right.to(heads_ptr.dtype.element_ty), mask=inside)


def norm_rope_(
    heads: Tensor,
    norm: Tensor | None,
    eps: float,
    rope_rows: Tensor,
    mean_squares: Tensor | None = None,
) -> None:
    """Normalise heads and rotate the first `rope_dim` values of each, in place.

    Args:
        heads: [num_tokens, num_heads, head_dim]; the values of a head are contiguous.
        norm: [num_heads, head_dim], or None for no normalisation.
        rope_rows: float32 [num_tokens, 2, rope_dim / 2]: cosines, then sines.
        mean_squares: contiguous float32 [num_tokens, num_heads], the mean square by which each head
            is normalised; None: the mean of its own squares.
    """
    num_tokens, num_heads, head_dim = heads.shape
    rope_dim = 2 * rope_rows.shape[-1]
    if num_tokens:
        _norm_rope_kernel[num_tokens, num_heads](
            heads,
            norm,
            mean_squares,
            rope_rows,
            eps,
            heads.stride(0),
            HEAD_STRIDE=heads.stride(1),
            HEAD_DIM=head_dim,
            ROPE_DIM=rope_dim,
            BLOCK=next_power_of_2(rope_dim // 2),
            REST_BLOCK=next_power_of_2(max(1, head_dim - rope_dim)),
            num_warps=1,
        )
