"""Sums the outputs of some of each token's experts. A program has one token and some columns."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2

MAX_WIDTH = 1024  # most columns of a program


@triton.jit
def _sum_held_kernel(
    made_ptr,
    chosen_ptr,
    out_ptr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < HIDDEN
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + place
        expert = tl.load(chosen_ptr + pair)
        is_held = (expert >= FIRST) & (expert < END)
        made = tl.load(made_ptr + pair * HIDDEN + column, mask=inside & is_held, other=0.0)
        total += made.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_held(made: Tensor, chosen: Tensor, held: range) -> Tensor:
    """Sum the outputs of held experts for each token: [num_tokens, hidden].

    The sum is in the order of a token's choices. Rows of other experts are not read, so they may
    hold anything.

    Args:
        made: [num_tokens * num_chosen, hidden], the outputs of the experts.
        chosen: int32 [num_tokens, num_chosen], the experts of these rows.
        held: the experts whose outputs are summed.
    """
    num_tokens, num_chosen = chosen.shape
    hidden = made.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=made.dtype, device=made.device)
    width = min(MAX_WIDTH, next_power_of_2(hidden))
    _sum_held_kernel[num_tokens, -(-hidden // width)](
        made,
        chosen,
        out,
        FIRST=held.start,
        END=held.stop,
        NUM_CHOSEN=num_chosen,
        HIDDEN=hidden,
        WIDTH=width,
        num_warps=4,
    )
    return out
