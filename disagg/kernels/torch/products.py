"""Attention as two matrix products and a softmax, for cases that torch's own attention lacks."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_by_products(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    cap: float | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend with a softmax in float32.

    Args:
        q: [num_seqs, num_heads, num_queries, head_dim].
        keys, values: [num_seqs, num_kv_heads, num_keys, head_dim].
        mask: added to the scores, or None.
        sinks: [num_heads, num_queries or 1, 1], or None.
        scale, cap: as in `ops.Scores`.
        scales: factors of keys and of values, [num_seqs, num_kv_heads, 1, num_keys] each; or None.

    Returns:
        [num_seqs, num_heads, num_queries, head_dim].
    """
    packed = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])  # queries that share a KV head
    scores = torch.matmul(packed, keys.transpose(2, 3)).float()
    scores *= scale if scales is None else scales[0] * scale
    capped_(scores, cap)
    by_head = scores.view(*q.shape[:3], -1)
    if mask is not None:
        by_head.add_(mask)
    weights = softmax(by_head, sinks).view(scores.shape)
    if scales is not None:
        weights.mul_(scales[1])
    return torch.matmul(weights.to(q.dtype), values).view(q.shape)


def capped_(scores: Tensor, cap: float | None) -> Tensor:
    """Make the scores cap * tanh(score / cap), in place."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension. `sinks` [..., 1] take part in it; the result omits them."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1].contiguous()
