"""silu(gate) * up over the two halves of one projection, as a Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.launcher import KernelLauncher

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    product = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


_silu_mul = KernelLauncher(_silu_mul_kernel)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: contiguous [num_rows, 2 * size] in, [num_rows, size] out."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, -(-size // _BLOCK))
        _silu_mul(grid, gate_up, out, SIZE=size, BLOCK=_BLOCK, num_warps=4)
    return out
