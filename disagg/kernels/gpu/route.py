"""Chooses the experts of each token and their weights: one program per token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.grouping import Grouping


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    chosen_ptr,
    scale,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Without a grouping (GROUPED) logits are ranked, which are more exact than probabilities."""
    token = tl.program_id(0).to(tl.int64)
    groups, members, places = tl.arange(0, GROUPS), tl.arange(0, MEMBERS), tl.arange(0, CHOSEN)
    experts = groups[:, None] * SIZE + members[None, :]
    inside = (groups < NUM_GROUPS)[:, None] & (members < SIZE)[None, :]
    last: tl.constexpr = NUM_GROUPS * SIZE - 1
    logits = tl.load(
        logits_ptr + token * (NUM_GROUPS * SIZE) + experts, mask=inside, other=float("-inf")
    ).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        total = tl.sum(tl.sum(scores, axis=1), axis=0)
        if GROUPED:
            scores = scores / total
    ranked = scores if GROUPED else logits
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    if NUM_GROUPS > 1:
        best = tl.max(ranked, axis=1)
        if SIGMOID:  # a group's score is the sum of its best two
            is_best = ranked == best[:, None]
            first = tl.min(tl.where(is_best, members[None, :], MEMBERS), axis=1)
            others = tl.where(members[None, :] == first[:, None], float("-inf"), ranked)
            best += tl.max(others, axis=1)
        best = tl.where(groups < NUM_GROUPS, best, float("-inf"))
        is_chosen = groups < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            value = tl.max(best, axis=0)
            one = tl.min(tl.where(best == value, groups, NUM_GROUPS - 1), axis=0)
            is_chosen = is_chosen | (groups == one)
            best = tl.where(groups == one, float("-inf"), best)
        ranked = tl.where(is_chosen[:, None], ranked, float("-inf"))
    is_nan = tl.max(tl.max(tl.where(inside & (scores != scores), 1, 0), axis=1), axis=0) > 0
    weights = tl.zeros([CHOSEN], dtype=tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        value = tl.max(tl.max(ranked, axis=1), axis=0)
        # Of equal scores, the first. NaN equals nothing; then the last expert is chosen.
        is_one = inside & (ranked == value)
        expert = tl.min(tl.min(tl.where(is_one, experts, last), axis=1), axis=0)
        is_one = inside & (experts == expert)
        score = tl.sum(tl.sum(tl.where(is_one, scores, 0.0), axis=1), axis=0)
        tl.store(chosen_ptr + token * NUM_CHOSEN + place, expert)
        weights = tl.where(places == place, score, weights)
        ranked = tl.where(is_one, float("-inf"), ranked)
    if NORMALIZED:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    elif not GROUPED:
        weights = weights / total
    weights = tl.where(is_nan, float("nan"), weights)  # such a score was never the largest
    target = weights_ptr + token * NUM_CHOSEN + places
    tl.store(target, weights * scale, mask=places < NUM_CHOSEN)


def choose_experts(
    logits: Tensor,
    num_chosen: int,
    is_normalized: bool,
    bias: Tensor | None = None,
    grouping: Grouping | None = None,
) -> tuple[Tensor, Tensor]:
    """Return float32 weights and int32 experts, [num_tokens, num_chosen] each, largest first.

    Args:
        bias: float32 [num_experts], added to the scores only for the choice; or None.
        grouping: how experts are chosen; None: those with the largest logits.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    how = grouping or Grouping(1, 1)
    size = num_experts // how.num_groups
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            bias,
            weights,
            chosen,
            how.scale,
            NUM_GROUPS=how.num_groups,
            NUM_CHOSEN_GROUPS=how.num_chosen_groups,
            SIZE=size,
            NUM_CHOSEN=num_chosen,
            GROUPS=next_power_of_2(how.num_groups),
            MEMBERS=next_power_of_2(size),
            CHOSEN=next_power_of_2(num_chosen),
            SIGMOID=how.is_sigmoid,
            NORMALIZED=is_normalized,
            GROUPED=grouping is not None,
            num_warps=1,
        )
    return weights, chosen
