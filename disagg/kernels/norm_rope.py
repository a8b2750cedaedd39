"""Per-head RMS normalisation (where a family has it) and rotary embedding in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.launcher import KernelLauncher, next_power_of_2


@triton.jit
def _norm_rope_kernel(
    heads_ptr,
    norm_ptr,
    rope_ptr,
    eps,
    token_stride,
    HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    start = heads_ptr + token * token_stride + head * HEAD_STRIDE
    left = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(start + half + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(left * left, axis=0) + tl.sum(right * right, axis=0)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)
        weight = norm_ptr + head * HEAD_DIM
        left *= inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        right *= inverse * tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + token * HEAD_DIM + columns, mask=inside, other=0.0)
    sin = tl.load(rope_ptr + token * HEAD_DIM + half + columns, mask=inside, other=0.0)
    turned_left = left * cos - right * sin
    turned_right = right * cos + left * sin
    tl.store(start + columns, turned_left.to(heads_ptr.dtype.element_ty), mask=inside)
    tl.store(start + half + columns, turned_right.to(heads_ptr.dtype.element_ty), mask=inside)


_norm_rope = KernelLauncher(_norm_rope_kernel)


def norm_rope_(heads: Tensor, norm: Tensor | None, eps: float, rope_rows: Tensor) -> None:
    """Normalise and turn heads in place.

    Args:
        heads: [num_tokens, num_heads, head_dim]; the values of a head touch.
        norm: [num_heads, head_dim], or None for no normalisation.
        rope_rows: float32 [num_tokens, 2, head_dim / 2]: cosines, then sines.
    """
    num_tokens, num_heads, head_dim = heads.shape
    if num_tokens:
        _norm_rope(
            (num_tokens, num_heads),
            heads,
            rope_rows if norm is None else norm,
            rope_rows,
            eps,
            heads.stride(0),
            HEAD_STRIDE=heads.stride(1),
            HEAD_DIM=head_dim,
            BLOCK=next_power_of_2(head_dim // 2),
            HAS_NORM=norm is not None,
            num_warps=1,
        )
