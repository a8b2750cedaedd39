"""Chooses the experts of each token and their weights: one program per token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.launcher import KernelLauncher, next_power_of_2


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    chosen_ptr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    inside = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + experts, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    peak = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - peak), axis=0)
    largest = tl.full([CHOSEN], float("-inf"), tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        value = tl.max(logits, axis=0)
        # The first of equals. Of NaNs none is equal, and they must choose something that exists.
        expert = tl.min(tl.where(logits == value, experts, NUM_EXPERTS - 1), axis=0)
        tl.store(chosen_ptr + token * NUM_CHOSEN + place, expert)
        largest = tl.where(places == place, value, largest)
        logits = tl.where(experts == expert, float("-inf"), logits)
    weights = tl.exp(largest - peak)
    if NORMALIZED:
        total = tl.sum(weights, axis=0)
    target = weights_ptr + token * NUM_CHOSEN + places
    tl.store(target, weights / total, mask=places < NUM_CHOSEN)


_route = KernelLauncher(_route_kernel)


def choose_experts(logits: Tensor, num_chosen: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return float32 weights and int32 experts, [num_tokens, num_chosen] each, largest first."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _route(
            (num_tokens,),
            logits,
            weights,
            chosen,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            EXPERTS=next_power_of_2(num_experts),
            CHOSEN=next_power_of_2(num_chosen),
            NORMALIZED=is_normalized,
            num_warps=1,
        )
    return weights, chosen
