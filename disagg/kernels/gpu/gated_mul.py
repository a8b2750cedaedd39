"""activation(gate) * up over the two halves of one projection, as a Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.activation import Activation

_BLOCK = 1024
_TWICE_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))


@triton.jit
def _gated_mul_kernel(
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    steep = gate
    if IS_GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        steep = _TWICE_ROOT * gate * (1.0 + 0.044715 * gate * gate)
    product = gate / (1.0 + tl.exp(-steep)) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


def gated_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up: contiguous [num_rows, 2 * size] in, [num_rows, size] out."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, -(-size // _BLOCK))
        is_gelu = activation == "gelu_tanh"
        _gated_mul_kernel[grid](gate_up, out, SIZE=size, BLOCK=_BLOCK, IS_GELU=is_gelu, num_warps=4)
    return out
